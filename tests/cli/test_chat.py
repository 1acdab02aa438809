"""`zmqengine chat` on a real terminal, against a real worker process."""

from __future__ import annotations

import json
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


def say(terminal: Terminal, text: str, told: str, start: int = 0) -> int:
    """Type a line, and wait for what it is told and the next prompt; where that ends."""
    terminal.type(text + "\n")
    return terminal.wait_for(PROMPT, start=terminal.wait_for(told, start=start))


def test_a_conversation_is_kept_found_and_loaded(
    start_worker: StartWorker,
    chat: Callable[..., Terminal],
    run: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its owner alone can read it; a text of several lines is one question."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    worker = start_worker(eos_index=3)
    terminal = chat(worker, "--stats")
    terminal.type('"""first line\nsecond line"""\n')
    at = terminal.wait_for(PROMPT, start=terminal.wait_for(" tokens in"))
    at = say(terminal, "/save mine", "saved as", at)
    terminal.type(CTRL_D)
    assert terminal.end() == 0
    assert terminal.shown.count(" tokens in") == 1
    file = tmp_path / "zmqengine" / "talks" / "mine.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "first line\nsecond line"
    found = run("chat", "--find", "SECOND", "--find", "line").stdout.splitlines()
    assert len(found) == 2, "the talk was kept by itself too"
    assert all("first line second line" in line for line in found)
    assert run("chat", "--find", "SECOND", "--find", "third").stdout == ""
    again = chat(worker, "--load", "mine")
    say(again, "/save copy", "saved as")
    assert json.loads((file.parent / "copy.json").read_text())["messages"] == messages
    assert run("chat", "-w", worker.name, "--load", "nothing", "x").stderr.startswith(
        "zmqengine: there is no talk 'nothing'"
    )


def test_options_and_instructions_change_inside(
    start_worker: StartWorker, chat: Callable[..., Terminal], tmp_path: Path
) -> None:
    """An option holds from the next answer on; an invalid one is reported in one line and changes nothing."""
    terminal = chat(start_worker(), "--stats")
    at = say(terminal, "/set max_tokens 3", "max_tokens 3")
    at = say(terminal, "hello", "3 out", at)
    at = say(terminal, "/set temperature hot", "zmqengine: ", at)
    at = say(terminal, "/set temprature 1", "unexpected option 'temprature'", at)
    at = say(terminal, "/set max_tokens 2", "max_tokens 2", at)
    at = say(terminal, "/retry", "2 out", at)
    at = say(terminal, "/system Be brief.", "the instructions are replaced", at)
    at = say(terminal, f"/save {tmp_path}/talk.json", "saved as", at)
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Be brief."
    at = say(terminal, "/model", "fake answers", at)
    say(terminal, "/model other", "zmqengine: no launcher", at)


def test_one_question_is_answered_and_that_is_all(
    start_worker: StartWorker,
    run: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A line break in it begins no second one; standard input and files go with it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    worker = start_worker()
    notes = tmp_path / "notes.txt"
    notes.write_text("remember the milk\n")
    ran = run(
        "chat",
        "-w",
        worker.name,
        "-n",
        "4",
        "--seed",
        "1",
        "Summarise:",
        "-",
        "-f",
        str(notes),
        stdin="a\nb\n",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    (talk,) = (tmp_path / "zmqengine" / "talks").iterdir()
    asked = json.loads(talk.read_text())["messages"][0]["content"]
    assert asked == "Summarise: a\nb\n\n\nnotes.txt:\n\nremember the milk\n"
    assert run("chat", "-w", worker.name, "-n", "4", "--no-log", "Hello there").returncode == 0
    assert len(list((tmp_path / "zmqengine" / "talks").iterdir())) == 1
    assert run("chat", "-w", worker.name, "--set", "x").returncode == 2


@pytest.mark.process
def test_a_talk_without_a_server_loads_its_model_and_frees_it(
    short_directory: str,
    run: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One line from nothing to an answer; a model that this machine lacks is named with those that it has."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    ran = run("chat", "--no-log", "Hello")
    assert (ran.returncode, ran.stdout) == (0, "Hello! How can I help you?\n"), ran.stderr
    assert "no worker runs: pico is loaded for this talk" in ran.stderr
    assert "pico is a toy: `zmqengine pull mlx-community/" in ran.stderr
    assert not [path for path in Path(short_directory).iterdir() if path.name.startswith("chat-")]
    refused = run("chat", "nobody", "Hello there")
    assert refused.returncode == 1
    assert "'nobody' does not exist; there are pico" in refused.stderr
