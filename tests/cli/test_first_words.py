"""The first words of programs to a person at a terminal: what runs, and what to do next."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.support.ports import free_port
from zmqengine.testing import FakeWorker

COMMAND = [sys.executable, "-m", "zmqengine.cli.main"]


def ended(terminal: Terminal) -> None:
    """End it."""
    terminal.process.send_signal(signal.SIGTERM)
    try:
        terminal.process.wait(60)
    finally:
        terminal.close()


def test_a_worker_says_what_to_do_next(short_directory: str) -> None:
    """With its name where that is not the default; details are for those who ask for them."""
    for name, words in (("default", "try `zmqengine chat`"), ("other", "zmqengine chat --worker other")):
        terminal = Terminal(
            [*COMMAND, "worker", "--name", name, "--engine", "fake:{}"], {"ZMQENGINE_DIR": short_directory}
        )
        try:
            terminal.wait_for(words)
            assert "info ready model=fake" in terminal.shown
            assert "batching=" not in terminal.shown
            # Only a start of several seconds says what it does.
            lines = [line.partition(" ")[2] for line in terminal.shown.splitlines() if " info " in line]
            assert "info loading model=pico" in lines
            assert {"info epoch", "info starting the engine", "info warming up"}.isdisjoint(lines)
            assert "epoch=" not in terminal.shown
        finally:
            ended(terminal)


def test_a_front_end_logs_text_on_a_terminal_and_names_its_page() -> None:
    """Elsewhere it logs JSON."""
    port = str(free_port())
    terminal = Terminal([*COMMAND, "http", "--port", port], {})
    try:
        terminal.wait_for(f"a browser may open http://127.0.0.1:{port}")
        assert "info listening" in terminal.shown
        assert "{" not in terminal.shown.split("listening")[0]
    finally:
        ended(terminal)
    with subprocess.Popen([*COMMAND, "http", "--port", port], stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr
        try:
            assert program.stderr.readline().startswith('{"time"')
            program.terminate()
            assert program.wait(60) in (0, -signal.SIGTERM)
        finally:
            program.kill()


@pytest.mark.parametrize("place", ["_Server.run", "_Server.startup", "HttpApp"])
def test_a_front_end_that_is_ended_while_it_starts_ends(place: str) -> None:
    """A signal is never lost between the handlers of the front-end and those of uvicorn."""
    program = f"""
import os, signal, sys
from zmqengine_http import HttpConfig, server

real = server.{place}

def ended_here(*arguments, **named):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments, **named)

server.{place} = ended_here
sys.exit(server.serve(HttpConfig(port={free_port()})))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60, text=True)
    # Before there is a server, the signal ends the process by itself.
    assert done.returncode == (-signal.SIGTERM if place == "HttpApp" else 0), done.stderr


@pytest.mark.parametrize("stale", [False, pytest.param(True, marks=pytest.mark.process)])
def test_a_person_without_a_worker_hears_of_it_at_once(short_directory: str, stale: bool) -> None:
    """Without a worker the command ends; it waits at the socket of a dead worker, which looks like a starting one."""
    if stale:
        folder = Path(short_directory) / "mine"
        folder.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "ctl"))
    terminal = Terminal([*COMMAND, "generate", "-w", "mine", "Once"], {"ZMQENGINE_DIR": short_directory})
    try:
        if stale:
            end = terminal.wait_for("waiting for the worker")
            # The client's own patience is ten seconds: it has not ended.
            assert terminal.process.poll() is None
        else:
            end = terminal.wait_for("start one with `zmqengine worker --name mine`")
            assert terminal.process.wait(60) == 1
        assert "Traceback" not in terminal.shown[:end]
    finally:
        ended(terminal)


def test_a_person_with_a_worker_hears_nothing_of_the_kind() -> None:
    """It is there."""
    with FakeWorker(process=True) as worker:
        terminal = Terminal([*COMMAND, "generate", "-w", worker.address, "-n", "3", "Once"], {})
        assert terminal.process.wait(60) == 0
        assert "no worker" not in terminal.shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--max-tokens", "-1", "x"], "--max-tokens must be at least 1"),
        (["http", "--api-key", "secret"], "--api-key must have at least 8 characters"),
        (["generate", "--choice", "", "x"], "--choice must have at least 1 character"),
        (["http", "--port", "70000"], "--port is 70000: it must be from 0 to 65535"),
    ],
)
def test_an_option_out_of_bounds_is_named_with_its_bound(arguments: list[str], words: str) -> None:
    """In words, not in those of the library that checks it."""
    with FakeWorker(process=True) as worker:
        ran = subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "ZMQENGINE_ADDRESS": worker.address},
        )  # fmt: skip
    assert ran.returncode in (1, 2)
    assert words in ran.stderr
    assert "$" not in ran.stderr
    assert ran.stderr.count("\n") == 1
