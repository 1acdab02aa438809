"""Several front-end processes on one port, for more streams than one process can carry.

A process that dies is restarted, while connections to its socket wait; one that fails to start ends all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from zmqengine_http.config import HttpConfig
from zmqengine_http.serving import logs, meter

RESTART_WAIT_S = 1.0

Serve = Callable[[HttpConfig, socket.socket], int]
"""Serves on a bound socket until a signal; returns the exit code."""


def run_processes(config: HttpConfig, listener: socket.socket, serve: Serve) -> int:
    """Run `serve` in `config.processes` processes at the address of `listener` until SIGINT or SIGTERM.

    Returns the exit code. The first signal drains, the second ends at once, as with one process.
    """
    with tempfile.TemporaryDirectory(prefix="zmqengine-http-") as counts, _signals() as signals:
        os.environ[meter.COUNTS_DIRECTORY] = counts
        listeners = _one_for_each(listener, config)
        processes = [_start(serve, config, each) for each in listeners]
        code: int | None = None
        while any(process.is_alive() for process in processes):
            alive = {process.sentinel: place for place, process in enumerate(processes) if process.is_alive()}
            for ready in wait([signals, *alive]):
                if ready is signals:
                    signals.recv(64)
                    code = code or 0
                    _end(processes, listeners)
                    continue
                place = alive[ready]  # type: ignore[index]
                ended = processes[place]
                ended.join()
                meter.forget_running(ended.pid)
                if code is not None:
                    continue
                logs.warning("a process has ended", pid=ended.pid, exit_code=ended.exitcode)
                if ended.exitcode is not None and ended.exitcode > 0:
                    code = ended.exitcode
                    _end(processes, listeners)
                else:
                    time.sleep(RESTART_WAIT_S)
                    processes[place] = _start(serve, config, listeners[place])
        return code or 0


def _one_for_each(listener: socket.socket, config: HttpConfig) -> list[socket.socket]:
    """A listening socket for each process, between which the kernel balances connections.

    Only Linux does that (SO_REUSEPORT). Elsewhere all processes share one socket, and the first to accept
    gets most connections of a burst.
    """
    if sys.platform != "linux":
        return [listener] * config.processes
    address = listener.getsockname()
    # The caller's bind, without SO_REUSEPORT, has shown that no other server listens there.
    listener.close()
    sockets = []
    for _ in range(config.processes):
        each = socket.socket(listener.family, socket.SOCK_STREAM)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(address)
        each.listen(config.backlog)
        sockets.append(each)
    return sockets


def _start(serve: Serve, config: HttpConfig, listener: socket.socket) -> BaseProcess:
    here = os.getcwd()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(serve, config, listener, here))
    # The child runs `python -c`, which imports from the directory that it is started in: this one has counts alone.
    os.chdir(os.environ[meter.COUNTS_DIRECTORY])
    try:
        process.start()
    finally:
        os.chdir(here)
    return process


def _run(serve: Serve, config: HttpConfig, listener: socket.socket, directory: str) -> None:
    os.chdir(directory)
    # Ctrl-C goes to the parent alone, which signals its children; `_end_with_parent` covers its death.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.configure(config)
    sys.exit(serve(config, listener))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _end(processes: list[BaseProcess], listeners: list[socket.socket]) -> None:
    for listener in listeners:
        # New connections are refused instead of waiting in a backlog that no process accepts from.
        listener.close()
    for process in processes:
        if process.is_alive():
            process.terminate()


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable at SIGINT or SIGTERM."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        reader.close()
        writer.close()
