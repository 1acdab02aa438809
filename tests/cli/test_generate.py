"""`zmqengine generate`, against a real worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, RunningWorker
from tests.cli.terminal import Terminal
from tests.http.tool_directory import tool_directory
from tests.support.stderr import complaints
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker

Run = Callable[..., subprocess.CompletedProcess[str]]
StartWorker = Callable[..., RunningWorker]


def test_the_text_goes_to_standard_output_and_nothing_else(start_worker: StartWorker, run: Run) -> None:
    """So that it can be piped; the same seed gives the same text."""
    worker = start_worker()
    arguments = ("generate", "-w", worker.name, "-n", "20", "--seed", "3", "Once upon")
    first, second = run(*arguments), run(*arguments)
    assert first.returncode == 0, first.stderr
    assert complaints(first.stderr) == []
    assert first.stdout == second.stdout != ""


def test_images_go_with_a_prompt_and_with_a_question(run: Run, tmp_path: Path) -> None:
    """`generate --image` and `chat --image`: another picture, another text; a file that is none is one line."""
    from PIL import Image

    paths = [str(tmp_path / f"{number}.png") for number in range(2)]
    for number, path in enumerate(paths):
        Image.new("RGB", (24, 24), (number * 200, 0, 0)).save(path)
    with FakeWorker(FakeEngineConfig(vision=True, eos_index=12)) as worker:
        options = ("-w", worker.address, "-n", "20", "--seed", "3")
        for command in (["generate", *options, "Once"], ["chat", *options]):
            outputs = [run(*command, "--image", path, stdin="Hello\n") for path in (paths[0], *paths)]
            assert [each.returncode for each in outputs] == [0, 0, 0], outputs
            assert outputs[0].stdout == outputs[1].stdout != outputs[2].stdout
        refused = run("generate", *options, "--image", str(tmp_path), "Once")
        assert refused.returncode != 0
        assert len(complaints(refused.stderr)) == 1
        shown = run("chat", *options, stdin=f"/image {paths[1]}\nHello\n/image none.png\n")
        assert shown.stdout.strip() == outputs[2].stdout.strip()
        assert "cannot be read" in shown.stderr


def test_the_prompt_can_come_from_standard_input(start_worker: StartWorker, run: Run) -> None:
    """With - or without a prompt."""
    worker = start_worker()
    options = ("generate", "-w", worker.name, "-n", "20", "--seed", "3")
    outputs = {
        run(*options, "Once").stdout,
        run(*options, stdin="Once").stdout,
        run(*options, "-", stdin="Once").stdout,
    }
    assert len(outputs) == 1


def test_json_has_the_text_and_the_figures(start_worker: StartWorker, run: Run) -> None:
    """One object, for programs."""
    worker = start_worker()
    options = ("-w", worker.name, "-n", "20", "--seed", "3", "Once")
    completion = json.loads(run("generate", "--json", *options).stdout)
    assert completion["finish"] == "length"
    assert completion["seed"] == 3
    assert len(completion["tokens"]) == 20
    assert completion["text"] == run("generate", *options).stdout


def test_a_request_that_cannot_work_is_one_line(start_worker: StartWorker, run: Run) -> None:
    """The worker's own words, and what to do."""
    worker = start_worker()
    refused = run("generate", "-w", worker.name, "-n", "100000", "Once")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert "shorten the prompt or lower --max-tokens" in refused.stderr
    hot = run("generate", "-w", worker.name, "--temperature", "-1", "Once")
    assert hot.returncode == 1
    assert "temperature" in hot.stderr


def test_no_worker_is_one_line_that_says_how_to_start_one(short_directory: str) -> None:
    """It waited 10 s in silence for a worker to come up."""
    ended = subprocess.run(
        [*COMMAND, "generate", "Once"], input="", capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "zmqengine worker" in ended.stderr
    assert "zmqengine serve" in ended.stderr
    assert f"no worker runs at ipc://{short_directory}/default/ctl" in ended.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_aborts_the_request_and_keeps_what_is_there(
    start_worker: StartWorker, run: Run, number: int, code: int
) -> None:
    """No traceback, and the worker has its row back."""
    worker = start_worker(step_ms=20)
    process = subprocess.Popen(
        [*COMMAND, "generate", "-w", worker.name, "-n", "4000", "Once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    assert first
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (code, b"")
    status = json.loads(run("status", "-w", worker.name, "--json").stdout)
    assert status["status"]["state"] == "ready"
    assert status["status"].get("requests", []) == []


def test_a_long_prompt_shows_its_progress_on_a_terminal(start_worker: StartWorker) -> None:
    """And erases it before the text."""
    worker = start_worker(step_ms=100, prefill_chunk=20)
    terminal = Terminal([*COMMAND, "generate", "-w", worker.name, "-n", "3", "x" * 400], {})
    try:
        at = terminal.wait_for("reading the prompt [")
        at = terminal.wait_for("of 400 tokens", start=at)
        terminal.wait_for("\r\x1b[2K", start=at)
        terminal.wait_for("400 tokens in, 3 out", start=at)
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_a_crash_of_the_worker_is_told_and_costs_no_token(run: Run) -> None:
    """Standard output is what it would have been; standard error says that the worker was lost and is back."""
    arguments = ("generate", "-n", "200", "--seed", "3", "Once", "-w")
    with FakeWorker(FakeEngineConfig(vocab_size=257)) as quick:
        calm = run(*arguments, quick.address)
    with WorkerProcess(FakeEngineConfig(vocab_size=257, step_ms=10), restart_wait_ms=1) as worker:
        worker.wait_ready()
        told = b""
        # On a busy machine the answer may be over before the kill.
        while not told:
            process = subprocess.Popen(
                [*COMMAND, *arguments, worker.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert process.stdout is not None
            first = os.read(process.stdout.fileno(), 1)
            worker.kill_engine()
            rest, told = process.communicate(timeout=60)
            assert process.returncode == 0, told
            assert (first + rest).decode() == calm.stdout
    assert told.decode().strip().startswith("zmqengine: ")
    assert b"Traceback" not in told


def test_the_text_can_be_held_to_a_schema_or_a_choice(run: Run, tmp_path: Path) -> None:
    """On the bundled model; what cannot be meant is one line."""
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"mood": {"enum": ["glad", "sad"]}}, "required": ["mood"],'
        ' "additionalProperties": false}'
    )
    with WorkerProcess(None, model="pico") as worker:
        worker.wait_ready()
        options = ("-w", worker.address, "Tell me about Tom.")
        held = run(
            "generate", "--schema", str(schema), "-n", "300", "--temperature", "0.7", "--seed", "1", *options
        )
        assert held.returncode == 0, held.stderr
        assert json.loads(held.stdout)["mood"] in ("glad", "sad")
        assert run("generate", "--choice", "yes", "--choice", "no", *options).stdout in ("yes", "no")
        assert run("generate", "--regex", "[0-9]{3}", *options).stdout.isdigit()
        assert run("generate", "--any-json", "-n", "3", *options).stdout.startswith("{")
    for wrong, said in (
        (("--regex", "a", "--any-json"), "give one of --schema"),
        (("--schema", "/dev/null"), "not a JSON schema"),
    ):
        refused = run("generate", *wrong, "x")
        assert refused.returncode == 2
        assert said in refused.stderr


def test_a_bound_on_reasoning_is_told_to_the_worker_or_refused(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By a model with marks of reasoning, after that many tokens; one without them is a line that names the option."""
    with WorkerProcess(None, model=str(tool_directory(tmp_path_factory.mktemp("models")))) as worker:
        worker.wait_ready()
        said = run(
            "generate", "-w", worker.address, "-n", "20", "--thinking-max", "3", "--json", "Tom.<think>Well"
        )
        assert said.returncode == 0, said.stderr
        output = json.loads(said.stdout)
        with worker.client() as client:
            assert output["tokens"][3:4] == client.tokenizer().encode("</think>", add_special_tokens=False)
    with FakeWorker() as fake:
        refused = run("generate", "-w", fake.address, "--thinking-max", "3", "Hello")
    assert refused.returncode != 0
    assert "thinking_max" in refused.stderr
