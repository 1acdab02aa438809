"""Watches of the parent process, and the worker's reports to its supervisor.

A watch has a `fileno()` for a poller, readable on a change, and a `check()` that calls `on_gone` once.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from zmqengine.protocol.addresses import Endpoints
from zmqengine.python_child import python_command

SUPERVISOR_FD = "ZMQENGINE_SUPERVISOR_FD"
WORKER_COMMAND = python_command("zmqengine.worker")
"""Command of a worker process, which takes its configuration from `WORKER_CONFIG` and no arguments."""
WORKER_CONFIG = "ZMQENGINE_WORKER_CONFIG"
RESTARTS = "ZMQENGINE_RESTARTS"

# Exit codes of a worker, known to the supervisor and the service files in deploy/.
EXIT_OK = 0
EXIT_FAILED = 1
"""Exit code for a failure that a restart may fix."""
EXIT_USAGE = 2
EXIT_HOPELESS = 78
"""Exit code for a failure that a restart repeats: no such model, a bad option, an address in use (EX_CONFIG of
sysexits.h)."""


# Seconds between two looks where the system does not signal the end of a parent.
_POLL_EVERY_S = 0.5


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from a worker to its supervisor."""

    endpoints: Endpoints | None = None
    ready: bool = False
    adapters: list[str] | None = None


class SupervisorLink:
    """The worker's end of the connection to its supervisor; it ends when the supervisor does, in any way."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        # Child processes of the worker must not keep the link open.
        self._socket.set_inheritable(False)
        self._on_gone = on_gone
        self._gone = False

    def fileno(self) -> int:
        """For a poller; readable when the supervisor is gone."""
        return self._socket.fileno()

    def check(self) -> bool:
        """Whether the supervisor is gone; calls `on_gone` the first time. Never blocks."""
        if self._gone:
            return True
        try:
            self._gone = self._socket.recv(4096) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._gone = True
        if self._gone:
            self._on_gone()
        return self._gone

    def report(
        self,
        *,
        endpoints: Endpoints | None = None,
        ready: bool = False,
        adapters: list[str] | None = None,
    ) -> None:
        """Report the real addresses or the adapters, which a restarted worker gets again, or that the worker is
        ready."""
        line = msgspec.json.encode(Report(endpoints=endpoints, ready=ready, adapters=adapters)) + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            # The supervisor is gone; the next check() reports it.
            return

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class ParentProcess:
    """Watches the process that started this one."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self._pid = os.getppid()
        self._on_gone = on_gone
        self._gone = False
        self._fd = _exit_fd(self._pid)

    def fileno(self) -> int:
        """For a poller; readable when the parent is gone."""
        return self._fd

    def check(self) -> bool:
        """Whether the parent is gone; calls `on_gone` the first time. Never blocks."""
        if not self._gone and (os.getppid() != self._pid or select.select([self._fd], [], [], 0)[0]):
            self._gone = True
            self._on_gone()
        return self._gone

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def restarts_so_far() -> int:
    """Number of restarts by this worker's supervisor; 0 without one."""
    restarts = os.environ.pop(RESTARTS, "0")
    return int(restarts) if restarts.isdigit() else 0


def watch_supervisor(on_gone: Callable[[], None]) -> SupervisorLink | None:
    """The link to this worker's supervisor, or None if there is none. `on_gone` runs inside `check()`."""
    fd = os.environ.pop(SUPERVISOR_FD, None)
    return None if fd is None else SupervisorLink(int(fd), on_gone)


def _exit_fd(pid: int) -> int:
    """A descriptor that becomes readable when the process, which is our parent, ends."""
    try:
        if sys.platform == "linux":
            return os.pidfd_open(pid)
        if sys.platform == "darwin":
            queue = select.kqueue()
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            queue.control([event], 0)
            # The descriptor stays open after the object is freed.
            fd = os.dup(queue.fileno())
            queue.close()
            return fd
    except OSError:
        # An old kernel, a sandbox that forbids it, or a parent that has ended.
        return _polled_exit_fd(pid)
    return _polled_exit_fd(pid)


def _polled_exit_fd(pid: int) -> int:
    ours, theirs = os.pipe()

    def poll() -> None:
        while os.getppid() == pid:
            time.sleep(_POLL_EVERY_S)
        os.close(theirs)

    threading.Thread(target=poll, name="parent", daemon=True).start()
    return ours
