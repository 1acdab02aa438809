"""A worker that a command starts for itself, and ends with itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import click

from zmqengine.cli.connection import loading
from zmqengine.cli.progress_line import ProgressLine
from zmqengine.errors import NotReady, WorkerLost
from zmqengine.python_child import python_command, python_environment
from zmqengine_client import Client

_END_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.5


@contextlib.contextmanager
def started_worker(model: str) -> Iterator[tuple[str, int]]:
    """A worker for the duration of the block: its name, and the process id of its engine, once it is ready.

    Raises `ClickException` with its last line if it ends before that.
    """
    name = f"{click.get_current_context().info_name}-{os.getpid()}"
    command = [*python_command("zmqengine.cli.main", "worker", "--name", name, "--model", model)]
    command += ["--die-with-parent", "--log-level", "error"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            with Client(name, name="start") as client, ProgressLine(lambda: loading(client)):
                pid = _wait_ready(client, process, log)
            yield name, pid
        finally:
            end(process)


def _wait_ready(client: Client, process: subprocess.Popen[bytes], log: IO[str]) -> int:
    """Wait until the worker is ready or its process has ended; returns the process id of its engine."""
    while True:
        try:
            return client.wait_ready(timeout_s=_LOOK_EVERY_S).pid
        except (WorkerLost, NotReady):
            if process.poll() is not None:
                raise click.ClickException(_last_line(log) or "the worker ended without a word") from None


def end(process: subprocess.Popen[Any]) -> None:
    """Terminate a process, and kill it if it stays."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().split("\n")
    return next((line for line in reversed(lines) if line.strip()), "").removeprefix("zmqengine worker: ")
