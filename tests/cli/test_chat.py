"""`zmqengine chat` on a real terminal, against a real worker process."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, RunningWorker
from tests.cli.terminal import Terminal

StartWorker = Callable[..., RunningWorker]
CTRL_D = "\x04"
PROMPT = "\n> "
UP = "\x1b[A"


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts a chat on a terminal, with its history in the test's own directory."""
    started: list[Terminal] = []

    def start(worker: RunningWorker, *options: str) -> Terminal:
        # A seed, so that no answer happens to hold a prompt.
        command = [*COMMAND, "chat", "-w", worker.name, "--seed", "1", *options]
        started.append(Terminal(command, {"XDG_STATE_HOME": str(tmp_path)}))
        started[-1].wait_for(PROMPT)
        return started[-1]

    yield start
    for terminal in started:
        terminal.close()


def test_each_answer_sees_the_turns_before_it(
    start_worker: StartWorker, chat: Callable[..., Terminal]
) -> None:
    """The prompt grows with the conversation, and /reset makes it as short as at first."""
    terminal = chat(start_worker(eos_index=5), "--stats")

    def ask(text: str, start: int) -> tuple[int, int]:
        terminal.type(text + "\n")
        end = terminal.wait_for(" tokens in", start=start)
        tokens_in = int(terminal.shown[terminal.shown.rindex("[", 0, end) + 1 : end].split()[0])
        return tokens_in, terminal.wait_for(PROMPT, start=end)

    first, at = ask("hello", 0)
    second, at = ask("hello", at)
    assert second > first + len("hello")
    terminal.type("/reset\n")
    at = terminal.wait_for(PROMPT, start=terminal.wait_for("a new conversation", start=at))
    third, _ = ask("hello", at)
    assert third == first
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(
    start_worker: StartWorker, chat: Callable[..., Terminal]
) -> None:
    """The next question is answered, and knows of the part that was said."""
    terminal = chat(start_worker(step_ms=10), "--stats")
    terminal.type("tell me everything\n")
    at = terminal.wait_for("\n", start=terminal.wait_for("everything"))
    # Some of the answer is there.
    terminal.wait_for_more(20, start=at)
    terminal.press_ctrl_c()
    at = terminal.wait_for(PROMPT, start=terminal.wait_for("[stopped]"))
    assert "finish: abort" in terminal.shown
    # Python sees a Ctrl-C that comes just before it waits for a line with the next one.
    at = terminal.wait_for(PROMPT, start=terminal.press_ctrl_c_until("Ctrl-D leaves", start=at))
    terminal.type("again\n")
    at = terminal.wait_for_more(30, start=at)
    terminal.press_ctrl_c()
    terminal.wait_for(PROMPT, start=terminal.wait_for("[stopped]", start=at - 10))
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_help_and_unknown_commands(start_worker: StartWorker, chat: Callable[..., Terminal]) -> None:
    """A slip of the finger is not sent to the model."""
    terminal = chat(start_worker())
    terminal.type("/help\n")
    at = terminal.wait_for(PROMPT, start=terminal.wait_for("start a new conversation"))
    terminal.type("/rest\n")
    terminal.wait_for(PROMPT, start=terminal.wait_for("/rest is not a command", start=at))
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_the_history_outlives_the_program_and_is_private(
    start_worker: StartWorker, chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    """Arrow up brings back what was said yesterday; nobody else can read it."""
    worker = start_worker(eos_index=3)
    yesterday = chat(worker)
    yesterday.type("a memorable question\n")
    at = yesterday.wait_for("\n", start=yesterday.wait_for("a memorable question"))
    yesterday.wait_for(PROMPT, start=at)
    yesterday.type(CTRL_D)
    assert yesterday.end() == 0
    file = tmp_path / "zmqengine" / "chat"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    today = chat(worker)
    today.type(UP)
    today.wait_for("a memorable question")


def test_a_conversation_that_is_too_long_says_what_to_do(
    start_worker: StartWorker, chat: Callable[..., Terminal]
) -> None:
    """The program stays, and the conversation is as it was."""
    terminal = chat(start_worker(context_tokens=100, eos_index=2))
    terminal.type("x" * 200 + "\n")
    at = terminal.wait_for(PROMPT, start=terminal.wait_for("/reset starts a new conversation"))
    terminal.type("short\n")
    terminal.wait_for(PROMPT, start=terminal.wait_for("\n", start=terminal.wait_for("short", start=at)))
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_an_image_at_fault_costs_one_question_and_the_status_says_so(
    start_worker: StartWorker, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """It stayed with every later question, so that all failed; and a script that asks one saw status 0."""
    worker, file = start_worker(), tmp_path / "picture.png"
    file.write_bytes(b"no picture")
    # A drawn seed may give a line break.
    ran = run(
        "chat", "-w", worker.name, "-n", "4", "--seed", "1", "--image", str(file), stdin="look\nhello\n"
    )
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 2
    assert "sees no images" in ran.stderr
    assert "the images are dropped" in ran.stderr
    assert len(ran.stdout.splitlines()) == 1, "the second question is answered"
    assert run("chat", "-w", worker.name, "-n", "4", stdin="hello\n").returncode == 0
