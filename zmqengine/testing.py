"""A worker without a model, for tests of front-ends.

    with FakeWorker() as worker, Client(worker.address) as client:
        assert client.generate_tokens([1, 2], max_tokens=3).read().tokens == worker.expected_tokens([1, 2], 3)

Everything but the model is real: the actor, the protocol, the sockets. It needs no MLX.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from zmqengine.config import WorkerConfig
from zmqengine.python_child import python_environment
from zmqengine_client.keys import CurveKeys
from zmqengine_client.sync.client import Client

if TYPE_CHECKING:
    from zmqengine.engine.fake.fake_engine import FakeEngineConfig
    from zmqengine.worker.telemetry.shared_status import SharedStatus

START_S = STOP_S = 60.0
"""A loaded machine may take seconds to start or stop a worker: running into it is a hang."""


class FakeWorker:
    """A worker on the fake engine, at an address of its own, for the duration of the `with` block.

    It runs in a thread of this process, or with `process=True` in a child process, which can be killed and restarted.
    `engine` configures the engine and its faults; `options` are further fields of `WorkerConfig`. A tcp `bind` may have
    port 0 in a child process; `keys` are for the client that waits until the worker is ready.
    """

    def __init__(
        self,
        engine: FakeEngineConfig | None = None,
        *,
        process: bool = False,
        keys: CurveKeys | None = None,
        **options: Any,
    ) -> None:
        from zmqengine.engine.fake.fake_engine import FakeEngineConfig

        self.engine = engine or FakeEngineConfig()
        self._keys = keys
        self._directory = tempfile.mkdtemp(prefix="zmqengine-", dir="/tmp")
        options.setdefault("bind", f"ipc://{self._directory}/w/ctl")
        self.config = WorkerConfig(engine=f"fake:{self.engine.to_json()}", log_level="error", **options)
        self._runner: _Process | _Thread = _Process() if process else _Thread()
        self._address = self.config.endpoints.ctl

    @property
    def address(self) -> str:
        """The address for clients."""
        return self._address

    @property
    def pid(self) -> int:
        """The process the worker runs in."""
        return self._runner.pid

    def __enter__(self) -> FakeWorker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.stop()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        """Start the worker, at the same address as before. Returns when it takes requests."""
        self.config = self._runner.start(self.config)
        self._address = self.config.endpoints.ctl
        try:
            with Client(self.address, keys=self._keys, connect_timeout_s=START_S) as client:
                client.wait_ready(START_S)
        except BaseException:
            self._runner.stop()
            raise

    def kill(self) -> None:
        """Kill the worker, like a crash. Only with `process=True`."""
        self._runner.kill()

    def restart(self, engine: FakeEngineConfig | None = None) -> None:
        """Kill the worker and start the next one, with another engine if one is given."""
        self.kill()
        if engine is not None:
            self.engine = engine
            self.config = replace(self.config, engine=f"fake:{engine.to_json()}")
        self.start()

    def freeze(self) -> None:
        """Suspend the worker, connections open, until `thaw`. Only with `process=True`."""
        os.kill(self._own_pid(), signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue after `freeze`."""
        os.kill(self._own_pid(), signal.SIGCONT)

    def expected_tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> list[int]:
        """The output of a request. It depends on the prompt and the seed."""
        from zmqengine.engine.fake.fake_engine import expected_tokens
        from zmqengine.engine.interface import RowRequest

        stops = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset({0}))
        request = RowRequest(row=0, prompt=prompt, max_tokens=max_tokens, seed=seed, stop_token_ids=stops)
        return expected_tokens(request, self.engine)

    def _own_pid(self) -> int:
        if self.pid == os.getpid():
            raise RuntimeError("this worker runs in a thread of this process: give process=True")
        return self.pid


class _Thread:
    """A worker in a thread of this process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._shared_status: SharedStatus | None = None
        self.pid = os.getpid()

    def start(self, config: WorkerConfig) -> WorkerConfig:
        from zmqengine.worker.main import Worker
        from zmqengine.worker.process.wakeup import Wakeup
        from zmqengine.worker.telemetry.shared_status import SharedStatus

        self._shared_status = SharedStatus(epoch=os.urandom(8), wakeup=Wakeup())
        worker = Worker(config, self._shared_status)
        self._thread = threading.Thread(target=worker.run, name="fake-worker", daemon=True)
        self._thread.start()
        return config

    def kill(self) -> None:
        raise RuntimeError("a thread cannot be killed: give process=True")

    def stop(self) -> None:
        if self._thread is None or self._shared_status is None:
            return
        # A second stop ends at once, whatever still runs.
        self._shared_status.ask_to_drain()
        self._shared_status.ask_to_drain()
        self._thread.join(STOP_S)
        stopped = not self._thread.is_alive()
        self._thread = None
        if not stopped:
            raise TimeoutError(f"the worker thread did not end within {STOP_S} s")
        self._shared_status.wakeup.close()


class _Process:
    """A worker in a child process. It ends when this process does."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError("the worker was not started")
        return self._child.pid

    def start(self, config: WorkerConfig) -> WorkerConfig:
        from zmqengine.worker.process.parent import SUPERVISOR_FD, WORKER_COMMAND, WORKER_CONFIG, Report

        # The worker drains when the other end is closed, however this process ends.
        self._link, theirs = socket.socketpair()
        with theirs:
            environment = python_environment(
                {WORKER_CONFIG: config.to_json(), SUPERVISOR_FD: str(theirs.fileno())}
            )
            self._child = subprocess.Popen(
                WORKER_COMMAND, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._link.settimeout(START_S)
        with self._link.makefile("rb") as lines:
            # An empty line: the worker ended during its start, and has said why.
            first = lines.readline() or b"{}"
        endpoints = msgspec.json.decode(first, type=Report).endpoints
        if endpoints is None:
            self.kill()
            raise RuntimeError("the worker did not start: see what it wrote on standard error")
        return config.pinned(endpoints)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(STOP_S)
        if self._link is not None:
            self._link.close()

    def stop(self) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGCONT)
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
        self.kill()
