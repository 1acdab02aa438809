"""`zmqengine demo`: the bundled model, one worker, two programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND
from tests.cli.terminal import Terminal
from zmqengine.worker.open_engine import CLAIMS_DIRECTORY

FIGURES = re.compile(r"front-end (\d+): (\d+) tokens, (\d+) tokens/s, first token after (\d+) ms")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch, short_directory: str) -> None:
    """Two programs and a worker share few cores here."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")


def test_two_processes_stream_from_one_worker() -> None:
    """Without a terminal the columns come at the end, and then the figures of each."""
    ran = subprocess.run(
        [*COMMAND, "demo", "-n", "20"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    figures = FIGURES.findall(ran.stdout)
    assert len(figures) == 2
    assert len({pid for pid, *_ in figures}) == 2
    assert all(int(tokens) > 10 and int(rate) > 0 for _, tokens, rate, _ in figures)
    assert "Once upon a time" in ran.stdout
    assert not leftovers()


@pytest.mark.process
def test_a_refused_request_is_told_without_a_traceback() -> None:
    """Each program says why, and no advice about the worker follows."""
    ran = subprocess.run(
        [*COMMAND, "demo", "-n", "0"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 1
    assert ran.stderr.count("zmqengine: --max-tokens must be at least 1\n") == 2
    assert "Traceback" not in ran.stderr
    assert ran.stderr.endswith("ended early; it says why above\n")


def test_a_model_that_cannot_be_loaded_is_told_without_advice_about_workers() -> None:
    """The last message of the demo's own worker is shown: another worker would not help."""
    ran = subprocess.run(
        [*COMMAND, "demo", "--model", "absent"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 1
    assert "there is no directory absent" in ran.stderr
    assert "--worker" not in ran.stderr


@pytest.mark.process
def test_on_a_terminal_the_columns_are_drawn_as_they_grow() -> None:
    """Drawing over what was drawn before."""
    terminal = Terminal([*COMMAND, "demo"], {})
    try:
        terminal.wait_for("\x1b[")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert len(FIGURES.findall(terminal.shown)) == 2
    assert re.search(r"\x1b\[\d+A", terminal.shown)
    assert "zmqengine worker" not in terminal.shown, "advice to start a worker, which the demo does itself"


@pytest.mark.slow
def test_a_crash_of_the_worker_loses_nothing() -> None:
    """--crash: both texts are those of a run without it. On a busy machine they may end before the kill: it says so."""
    options = ("demo", "-n", "300", "--seed", "5")
    calm = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False, timeout=100)
    assert calm.returncode == 0, calm.stderr
    for _ in range(5):
        crashed = subprocess.run(
            [*COMMAND, *options, "--crash"], capture_output=True, text=True, check=False, timeout=100
        )
        assert crashed.returncode == 0, crashed.stderr
        assert columns(crashed.stdout) == columns(calm.stdout)
        survived = "survived 1 crash of the worker" in crashed.stdout
        assert survived or "ended before the worker was killed" in crashed.stderr
        if survived:
            return
    raise AssertionError("the worker was never killed in time")


@pytest.mark.process
def test_the_model_says_what_is_in_pictures() -> None:
    """--image: pictures that the program draws, the questions about them and the right answers."""
    ran = subprocess.run(
        [*COMMAND, "demo", "--image"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    answers = re.findall(r"model  (.*)", ran.stdout)
    assert answers == ["A red circle.", "A red circle and a blue square.", "Three."]
    assert not leftovers()


@pytest.mark.process
def test_the_model_calls_functions_and_tells_what_they_gave() -> None:
    """--tools: calls with the arguments of what was asked, their results, and the answers in words."""
    ran = subprocess.run(
        [*COMMAND, "demo", "--tools"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    shown = ran.stdout
    assert "calls add(a=417, b=2385)" in shown
    assert 'calls read_file(path="notes.txt")' in shown
    assert 'calls count_letters(word="river")' in shown
    assert "417 + 2385 = 2802." in shown
    assert shown.count("the blue boat") == 2
    assert "river has 5 letters." in shown
    assert "You are welcome!" in shown
    assert re.search(r"\b3 calls, \d+ tokens in", shown)
    assert not leftovers()


def test_a_crash_is_for_the_two_streams() -> None:
    """--crash with --tools is bad usage."""
    ran = subprocess.run(
        [*COMMAND, "demo", "--tools", "--crash"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 2
    assert "--crash" in ran.stderr


def test_a_worker_that_cannot_start_is_one_line() -> None:
    """The worker's own reason."""
    ran = subprocess.run(
        [*COMMAND, "demo", "--model", "/nowhere"], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 1
    assert "/nowhere" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_the_front_ends_know_nothing_of_the_worker() -> None:
    """They import the client library, and neither MLX nor the worker."""
    program = (
        "import sys, zmqengine.cli.commands.demo.front_end; "
        "print([name for name in sys.modules if name.startswith(('mlx', 'zmqengine.worker', 'zmqengine.engine'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def columns(shown: str) -> str:
    """What was written, without the process ids above it."""
    return shown.split("\n\n")[0].split("\n", 2)[2]


def leftovers() -> list[Path]:
    """What demos of this test left in the directory for sockets, where only the claims on memory may stay."""
    left = Path(os.environ["ZMQENGINE_DIR"]).iterdir()
    return [path for path in left if path.name != CLAIMS_DIRECTORY]
