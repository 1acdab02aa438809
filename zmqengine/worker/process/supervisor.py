"""The supervisor: restarts a worker process that dies, and stops with it on a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from zmqengine.config import WorkerConfig
from zmqengine.python_child import python_environment
from zmqengine.worker.process.parent import (
    EXIT_FAILED,
    EXIT_HOPELESS,
    EXIT_OK,
    EXIT_USAGE,
    RESTARTS,
    SUPERVISOR_FD,
    WORKER_COMMAND,
    WORKER_CONFIG,
    ParentProcess,
    Report,
)

KILL_AFTER_S = 5.0
"""Seconds beyond the drain time, and after a second signal, before the worker is killed."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_log = logging.getLogger("zmqengine.supervisor")


def supervise(config: WorkerConfig, *, command: Sequence[str] = WORKER_COMMAND) -> int:
    """Run a worker until it ends well, cannot start, or dies too often; returns this process's exit code.

    0: it drained. 1: it died more than `restarts_max` times without being ready for `restart_window_s` in
    between, or ended badly after a stop signal. 2 and EXIT_HOPELESS are the worker's own: starting it again would not
    help. SIGTERM, SIGINT and SIGHUP make it drain, a second one makes it end at once, and it is killed if it does
    neither in time. When this process dies, however it does, the worker drains. Call it on the main thread.
    """
    with _signals_as_bytes((*_STOP_SIGNALS, signal.SIGCHLD)) as wakeup:
        return _Supervisor(config, tuple(command), wakeup).run()


@dataclass(slots=True)
class _EngineProcess:
    process: subprocess.Popen[bytes]
    link: socket.socket
    linked: bool = True
    unread: bytes = b""
    ready_since_s: float | None = None
    kill_at_s: float | None = None


class _Supervisor:
    def __init__(self, config: WorkerConfig, command: tuple[str, ...], wakeup: socket.socket) -> None:
        self._config = config
        self._command = command
        self._wakeup = wakeup
        self._stops = 0
        self._restarts = 0
        self._starts = 0
        self._parent = ParentProcess(self._stop) if config.die_with_parent else None
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)
        if self._parent is not None:
            self._selector.register(self._parent, selectors.EVENT_READ)

    def run(self) -> int:
        """Lives of the worker, one after the other."""
        with self._selector:
            while True:
                child = self._start()
                try:
                    code = self._watch(child)
                finally:
                    self._clean_up(child)
                if code in (EXIT_OK, EXIT_USAGE, EXIT_HOPELESS):
                    return code
                if self._stops:
                    if code == -signal.SIGTERM:
                        # It died of the signal before its handler was set.
                        return EXIT_OK
                    _log.error("the worker %s while it was stopping", how_it_ended(code))
                    return EXIT_FAILED
                if not self._may_restart(child, code):
                    return EXIT_FAILED
                if not self._wait_to_restart(code):
                    return EXIT_OK

    def _start(self) -> _EngineProcess:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=python_environment(
                    {
                        WORKER_CONFIG: self._config.to_json(),
                        SUPERVISOR_FD: str(theirs.fileno()),
                        RESTARTS: str(self._starts),
                    }
                ),
                # A process group of its own: a Ctrl-C in the terminal reaches the worker once, from here.
                start_new_session=True,
            )
        self._starts += 1
        self._selector.register(ours, selectors.EVENT_READ)
        return _EngineProcess(process, ours)

    def _watch(self, child: _EngineProcess) -> int:
        """Wait until the worker has ended; its code, negative for a signal."""
        stops_sent = 0
        while (code := child.process.poll()) is None:
            if stops_sent < self._stops:
                stops_sent = self._stops
                self._pass_on_stop(child)
            if child.kill_at_s is not None and time.monotonic() >= child.kill_at_s:
                _log.error("the worker did not end in time: killing it")
                child.process.kill()
                child.kill_at_s = None
            self._wait(child.kill_at_s)
            self._read_reports(child)
        # Reports from before its death: a chosen port is used again.
        self._read_reports(child)
        return code

    def _pass_on_stop(self, child: _EngineProcess) -> None:
        drain_s = self._config.drain_timeout_s if self._stops == 1 else 0.0
        child.kill_at_s = time.monotonic() + drain_s + KILL_AFTER_S
        if self._stops > 2:
            child.process.kill()
        else:
            child.process.terminate()

    def _read_reports(self, child: _EngineProcess) -> None:
        if not child.linked:
            return
        try:
            received = child.link.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            child.linked = False
            self._selector.unregister(child.link)
            return
        *lines, child.unread = (child.unread + received).split(b"\n")
        for line in lines:
            report = msgspec.json.decode(line, type=Report)
            if report.endpoints is not None:
                self._config = self._config.pinned(report.endpoints)
            if report.adapters is not None:
                self._config = dataclasses.replace(self._config, adapter=tuple(report.adapters))
            if report.ready:
                child.ready_since_s = time.monotonic()

    def _may_restart(self, child: _EngineProcess, code: int) -> bool:
        ready_s = 0.0 if child.ready_since_s is None else time.monotonic() - child.ready_since_s
        if ready_s >= self._config.restart_window_s:
            self._restarts = 0
        if self._restarts >= self._config.restarts_max:
            _log.error(
                "giving up: the worker %s, after %d restarts; see its last messages above, then start it again",
                how_it_ended(code),
                self._restarts,
            )
            return False
        self._restarts += 1
        return True

    def _wait_to_restart(self, code: int) -> bool:
        """Back off; False if a stop signal arrives."""
        wait_ms = min(
            self._config.restart_wait_ms * 2 ** min(self._restarts - 1, 30), self._config.restart_wait_max_ms
        )
        _log.warning(
            "the worker %s: starting it again in %.1f s (%d of %d)",
            how_it_ended(code),
            wait_ms / 1000,
            self._restarts,
            self._config.restarts_max,
        )
        until_s = time.monotonic() + wait_ms / 1000
        while not self._stops and time.monotonic() < until_s:
            self._wait(until_s)
        return not self._stops

    def _wait(self, until_s: float | None) -> None:
        """Sleep until a signal, a report, the end of a process, or `until_s`."""
        timeout_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        self._selector.select(timeout_s)
        self._read_signals()
        if self._parent is not None and self._parent.check():
            # A closed link stays readable.
            self._selector.unregister(self._parent)
            self._parent.close()
            self._parent = None

    def _read_signals(self) -> None:
        try:
            received = self._wakeup.recv(4096)
        except BlockingIOError:
            return
        for number in received:
            if number in _STOP_SIGNALS:
                self._stop()

    def _stop(self) -> None:
        self._stops += 1

    def _clean_up(self, child: _EngineProcess) -> None:
        if child.linked:
            self._selector.unregister(child.link)
        child.link.close()
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()


def how_it_ended(code: int) -> str:
    """The end of a process by its exit code, as the rest of a sentence."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


@contextlib.contextmanager
def _signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """A non-blocking socket that gets the number of each of these signals as a byte.

    Inside the context their handlers do nothing else; earlier handlers are restored at its end. For the main thread.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        # In this order, a signal between the two acts as before instead of being lost.
        earlier_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(earlier_fd)
            for number, handler in earlier.items():
                signal.signal(number, handler)
