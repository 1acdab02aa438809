"""Real worker processes for tests: supervised or not, on the fake engine or on pico, at addresses of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine_client import Client

DEFAULT_FAKE = FakeEngineConfig()
START_S = 60.0
"""What a loaded machine may take to start a worker: running into it is a hang."""


class WorkerProcess:
    """`zmqengine worker` in a process of its own, ready to serve. Use it as a context manager.

    `fake` is the fake engine's configuration, or its JSON where that says more than the class; None is pico.
    `options` are fields of `WorkerConfig`. `address` is what clients are given.
    """

    def __init__(self, fake: FakeEngineConfig | str | None = DEFAULT_FAKE, **options: Any) -> None:
        # Not pytest's tmp_path: a socket path may have 103 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="ze-"))
        # A test run that is killed leaves nothing behind.
        options.setdefault("die_with_parent", True)
        options.setdefault("bind", f"ipc://{self.directory}/w/ctl")
        if fake is not None:
            text = fake.to_json() if isinstance(fake, FakeEngineConfig) else fake
            options["engine"] = f"fake:{text}"
        self._options = options
        self._killed: set[int] = set()
        self._log = (self.directory / "log").open("wb")
        self.process = self._start()
        self.address = str(options["bind"])

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What the worker has said on standard error."""
        return (self.directory / "log").read_text(errors="replace")

    @property
    def listening_at(self) -> str:
        """The real address of ctl, once the worker has said it; empty before."""
        return next(iter([*self.log.split("address="), ""][1].split()), "")

    def client(self, **options: Any) -> Client:
        """A client that gives up only where a test would hang."""
        defaults: dict[str, Any] = {
            "connect_timeout_s": START_S,
            "answer_timeout_s": START_S,
            "worker_lost_timeout_s": START_S,
        }
        return Client(self.address, **(defaults | options))

    def wait_ready(self) -> None:
        """Until it takes requests."""
        with self.client() as client:
            client.wait_ready()

    def engine_pid(self) -> int:
        """The process that holds the engine: the child of a supervised worker, or the worker itself."""
        if not self._options.get("supervise", True):
            return self.process.pid
        children: list[psutil.Process] = []
        wait_until(lambda: children.extend(self._children()) or children, "no engine process")
        return int(children[0].pid)

    def kill_engine(self) -> int:
        """SIGKILL the engine process; returns its pid. One that was killed before is not killed again."""
        wait_until(lambda: self.engine_pid() not in self._killed, "no new engine process")
        pid = self.engine_pid()
        os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        return pid

    def terminate(self) -> int:
        """SIGTERM the worker and wait for its end; returns the exit code."""
        self.process.terminate()
        return self.process.wait(START_S)

    def close(self) -> None:
        """End every process of it and remove its files."""
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            self._end_measured()
        alive = [self.process.pid, *(child.pid for child in self._children())]
        for pid in alive:
            if psutil.pid_exists(pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait(START_S)
        self._log.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end_measured(self) -> None:
        # What is killed takes with it what it has noted of its lines. The second signal ends what would still drain.
        for _ in range(2):
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3.0)

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _start(self) -> subprocess.Popen[bytes]:
        program = (
            "import os, sys\n"
            "from zmqengine.config import WorkerConfig\n"
            "config = WorkerConfig.from_json(sys.argv[1])\n"
            "if config.supervise:\n"
            "    from zmqengine.worker.process.supervisor import supervise as run\n"
            "else:\n"
            "    from zmqengine.worker.main import serve as run\n"
            "sys.exit(run(config))\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, msgspec.json.encode(self._options).decode()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        )


async def wait_in_loop(done: Callable[[], object], otherwise: str, *, seconds: float = START_S) -> None:
    """`wait_until` that leaves the event loop free."""
    deadline_s = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline_s, otherwise
        await asyncio.sleep(0.005)


def wait_until(done: Callable[[], object], otherwise: str, *, seconds: float = START_S) -> None:
    """Until `done()`; fails with `otherwise` if that does not come about."""
    deadline_s = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.005)
