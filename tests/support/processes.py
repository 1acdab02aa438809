"""Processes that tests watch end."""

from __future__ import annotations

import psutil

from tests.support.workers import wait_until


def wait_until_dead(pid: int) -> None:
    """Until no such process runs; one that only waits to be reaped does not."""
    wait_until(lambda: not is_alive(pid), f"process {pid} lives on")


def is_alive(pid: int) -> bool:
    """Whether it runs."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
