"""Facts of the machine and of the run for a report."""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import psutil

BUSY_SHARE = 0.5
NVIDIA_SMI_S = 10.0
PACKAGES = ("zmqengine", "mlx", "mlx-lm", "pyzmq", "msgspec", "numpy", "httptools", "tokenizers")


class RunSetting(TypedDict):
    """Time, machine, versions and command of a run: fields of every report."""

    started_at: str
    command: list[str]
    machine: dict[str, str]
    versions: dict[str, str]
    notes: list[str]


def setting() -> RunSetting:
    """The setting of a run that begins now. Call it before starting servers, which make the machine look busy."""
    return RunSetting(
        started_at=now(),
        command=command_line(),
        machine=machine_facts(),
        versions=versions(),
        notes=busy_notes(),
    )


def machine_facts() -> dict[str, str]:
    """System, processor, cores and memory."""
    return {
        "system": _system_name(),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load_average_at_start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


async def gpu_clock_mhz() -> float | None:
    """The current SM clock of an NVIDIA GPU; None without nvidia-smi."""
    query = ("--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0")
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi", *query, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        out, _ = await asyncio.wait_for(process.communicate(), NVIDIA_SMI_S)
        return float(out)
    except (OSError, ValueError, asyncio.TimeoutError):
        return None


def busy_notes() -> list[str]:
    """A warning if other work was running; call it before starting servers."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY_SHARE * cores:
        return []
    return [f"the machine was busy when this began: load average {load:.1f} on {cores} cores"]


def versions() -> dict[str, str]:
    """Versions of Python and of the main packages, and the commit of a checkout."""
    versions_by_name = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return versions_by_name | ({"commit": commit} if commit else {})


def command_line() -> list[str]:
    """The command line of this run, quoted."""
    program = (
        "zmqengine" if Path(sys.argv[0]).name in ("zmqengine", "main.py", "__main__.py") else sys.argv[0]
    )
    return [program, *(shlex.quote(word) for word in sys.argv[1:])]


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _system_name() -> str:
    """System, release, machine and C library; names that builders of kernels append tell nothing about speed."""
    release = platform.release()
    return platform.platform().replace(release, release.partition("-")[0])


def _cpu_name() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    directory = Path(__file__).parent
    commit = _output(["git", "-C", str(directory), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return ""
    changed = _output(["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit} and changes" if changed else commit


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
