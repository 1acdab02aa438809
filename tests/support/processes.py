"""Processes that tests watch end, and pairs of starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def two_starts(script: str, cache_directory: Path) -> list[list[str]]:
    """The words that a Python script prints in two processes, one after the other, with one cache directory."""
    return [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"ZMQENGINE_CACHE_DIR": str(cache_directory)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
