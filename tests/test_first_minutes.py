"""docs/first-minutes.md: the commands of a newcomer, typed in their order, show what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.workers import START_S, wait_until

pytestmark = pytest.mark.process

PAGE = (Path(__file__).parents[1] / "docs/first-minutes.md").read_text()
SERVE = "zmqengine serve"


def sessions() -> list[tuple[str, list[str]]]:
    """Each command of the page with the lines that it shows."""
    commands: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                commands.append((line.removeprefix("$ "), []))
            else:
                commands[-1][1].append(line)
    return commands


def missing(lines: list[str], output: str) -> list[str]:
    """The lines that the output does not show in this order."""
    at, absent = 0, []
    for line in lines:
        pattern = "[^\n]*".join(re.escape(part) for part in re.sub(r" +", " ", line).split("..."))
        found = re.compile(pattern).search(re.sub(r" +", " ", output), at)
        if found is None:
            absent.append(line)
        else:
            at = found.end()
    return absent


@contextmanager
def started(command: str, environment: dict[str, str], directory: Path) -> Iterator[Path]:
    """A command that goes on in a terminal of its own; the file of what it shows."""
    shown = directory / "serve.log"
    with shown.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], env=environment, stdout=file, stderr=file, cwd=directory
        )
    try:
        yield shown
    finally:
        process.terminate()
        assert process.wait(2 * START_S) == 0


def test_each_command_shows_what_the_page_says(tmp_path: Path) -> None:
    """One user, one machine without other models, from the first command to the last."""
    port = free_port()
    commands = sessions()
    assert len(commands) > 15
    with tempfile.TemporaryDirectory(prefix="zf-", dir="/tmp") as sockets:
        environment = os.environ | {
            "ZMQENGINE_DIR": sockets, "XDG_STATE_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1", "ZMQENGINE_HTTP_PROBE_MS": "100",
        }  # fmt: skip
        place = next(index for index, (command, _) in enumerate(commands) if command == SERVE)
        before = [typed(command, lines, environment, tmp_path) for command, lines in commands[:place]]
        # The page has the usual port, which another program of this machine may have.
        served, *later = [
            (command.replace("8000", str(port)), [line.replace("8000", str(port)) for line in lines])
            for command, lines in commands[place:]
        ]
        with started(f"{served[0]} --port {port}", environment, tmp_path) as shown:
            wait_until(lambda: str(port) in shown.read_text(), "no server", seconds=4 * START_S)
            assert missing(served[1], shown.read_text()) == []
            after = [typed(command, lines, environment, tmp_path) for command, lines in later]
    problems = [problem for problem in before + after if problem]
    assert not problems, "\n\n".join(problems)


def typed(command: str, lines: list[str], environment: dict[str, str], directory: Path) -> str:
    """What a command does not show of these lines, and what it shows; empty if nothing is missing."""
    ran = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=directory, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=4 * START_S, check=False,
    )  # fmt: skip
    absent = missing(lines, ran.stdout)
    return f"$ {command}\n{ran.stdout}\nmisses {absent}" if absent else ""


def test_a_line_that_is_not_shown_is_missed() -> None:
    """What stands in another order is, too."""
    assert missing(["one", "t...o"], "one\ntwo\n") == []
    assert missing(["two", "one"], "one\ntwo\n") == ["one"]
    assert missing(["t...o"], "t\no\n") == ["t...o"]
