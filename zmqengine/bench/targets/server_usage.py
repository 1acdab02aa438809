"""CPU time and memory of server processes, children included."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

import psutil


class ServerUsage:
    """CPU time and memory of the processes of one target; None if no process is known."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)

    def cpu_s(self) -> float | None:
        """CPU time since the processes started, user and system."""
        times = [_cpu_s(process) for process in self._processes()]
        return sum(times) if times else None

    def memory_bytes(self) -> int | None:
        """Resident memory now."""
        sizes = [_resident_bytes(process) for process in self._processes()]
        return sum(sizes) if sizes else None

    def _processes(self) -> set[psutil.Process]:
        processes = set()
        for pid in self._pids:
            try:
                process = psutil.Process(pid)
                processes |= {process, *process.children(recursive=True)}
            except psutil.Error:
                continue
        return processes


def listening_pid(url: str) -> int | None:
    """The local process that listens on the URL's port, if the system shows it."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        address = connection.laddr
        if (
            connection.status == psutil.CONN_LISTEN
            and address
            and address[1] == parts.port
            and connection.pid
        ):
            return int(connection.pid)
    return None


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
