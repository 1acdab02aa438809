"""Real workers on the fake engine for the command line to talk to."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.workers import START_S
from zmqengine.cli.main import main
from zmqengine_client import Client


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A command that sets up its log does so for itself: later its handlers would write to a closed stream."""
    ours = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("zmqengine")
    ]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in ours]
    for logger in ours:
        logger.handlers[:] = []
    yield
    for logger, (handlers, level, propagate) in zip(ours, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture
def short_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory for sockets whose paths the system allows; workers and clients of this test use it."""
    directory = tempfile.mkdtemp(prefix="zmqe-", dir="/tmp")
    monkeypatch.setenv("ZMQENGINE_DIR", directory)
    monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class RunningWorker:
    """A worker process without a supervisor, on a fake engine of this shape."""

    def __init__(self, directory: str, **shape: object) -> None:
        self.name = f"w{next(_numbers)}"
        self.log = Path(directory) / f"{self.name}.log"
        engine = "fake:" + json.dumps({"vocab_size": 257, **shape})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "worker", "--name", self.name, "--no-supervise", "--engine", engine], stderr=log
            )
        # A command does not wait for a worker without a socket file.
        with Client(self.name, connect_timeout_s=START_S) as client:
            client.ping()

    @property
    def socket(self) -> Path:
        """The file of its ctl socket."""
        return Path(os.environ["ZMQENGINE_DIR"]) / self.name / "ctl"

    def end(self) -> int:
        """Drain it; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture
def start_worker(short_directory: str) -> Iterator[Callable[..., RunningWorker]]:
    """Starts workers; each ends with the test."""
    started: list[RunningWorker] = []

    def start(**shape: object) -> RunningWorker:
        started.append(RunningWorker(short_directory, **shape))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Calls the command line without a terminal. In this process: starting one takes longer than most commands."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


COMMAND = (sys.executable, "-m", "zmqengine.cli.main")
_numbers = itertools.count()
