"""Python, MLX, the BLAS, memory and the clock."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, cast

import zmqengine
from zmqengine.doctor.finding import Finding

PROBE_S = 120.0
_SMALL_LIMIT_BYTES = 2 << 30


class Machine(NamedTuple):
    """Findings of the machine, and MLX's memory limit in bytes; 0 if that is not known."""

    findings: list[Finding]
    limit_bytes: int


def look_at_machine() -> Machine:
    """Look at Python, MLX, the BLAS, memory and the clock. MLX is imported in a child process."""
    findings = [_python(), *_clock()]
    if importlib.util.find_spec("mlx") is None:
        install = "pip install 'zmqengine[worker]' if a worker is to run here"
        return Machine([*findings, Finding("warn", "mlx", "MLX is not installed", install)], 0)
    report, problem = _probe()
    if report is None:
        return Machine(
            [*findings, Finding("fail", "mlx", f"MLX does not work here ({problem})", _mlx_advice())], 0
        )
    limit = int(str(report["recommended_bytes"]))
    return Machine(
        [*findings, *_mlx(report), *_environment(report), *_blas(str(report["blas"])), *_memory(report)],
        limit,
    )


def _python() -> Finding:
    text = (
        f"Python {platform.python_version()}, zmqengine {zmqengine.__version__}, "
        f"{platform.system()} {platform.machine()}"
    )
    if sys.version_info < (3, 11) and importlib.util.find_spec("mlx") is not None:
        return Finding("fail", "python", text, "a worker needs Python 3.11 or newer")
    return Finding("ok", "python", text)


def _clock() -> Iterator[Finding]:
    """The clock: one that is behind makes the hub's certificates invalid."""
    installed_s = os.stat(zmqengine.__file__).st_mtime
    behind_s = installed_s - time.time()
    if behind_s > 86_400:
        text = f"the clock is at least {behind_s / 86_400:.0f} days behind"
        yield Finding("fail", "clock", text, "set it, or fetching models fails")
    else:
        yield Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _probe() -> tuple[dict[str, object] | None, str]:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "zmqengine.engine.host.machine_report"],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {PROBE_S:.0f} s"
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        return None, lines[-1][:200] if lines else f"it ended with code {ended.returncode}"
    report: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return report, ""


def _mlx_advice() -> str:
    if sys.platform == "linux":
        return "pip install 'zmqengine[worker]' for the CPU, or [cuda] with NVIDIA's driver"
    return "pip install --force-reinstall 'zmqengine[worker]'"


def _mlx(report: dict[str, object]) -> Iterator[Finding]:
    where = f"{report['device']} ({report['device_name'] or 'unnamed'})"
    yield Finding("ok", "mlx", f"MLX {report['mlx']} computes on {where}")
    try:
        found = importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("fail", "mlx-lm", "mlx-lm is not installed", "pip install 'zmqengine[worker]'")
        return
    oldest, newest = tested_mlx_lm()
    if newest and not _release(oldest) <= _release(found) <= _release(newest):
        text = f"mlx-lm {found} is not one of {oldest} to {newest}, with which the engine is tested"
        yield Finding("warn", "mlx-lm", text, f"pip install mlx-lm=={newest}")
    else:
        yield Finding("ok", "mlx-lm", f"mlx-lm {found}")


def tested_mlx_lm() -> tuple[str, str]:
    """The oldest and the newest release that this package requires; empty where its metadata is not installed."""
    try:
        required = importlib.metadata.requires("zmqengine") or []
    except importlib.metadata.PackageNotFoundError:
        return "", ""
    bounds = next((line.partition(";")[0] for line in required if line.startswith("mlx-lm")), "")
    oldest, newest = (re.search(rf"{sign}=([\d.]+)", bounds) for sign in "><")
    return (oldest[1], newest[1]) if oldest and newest else ("", "")


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _environment(report: dict[str, object]) -> Iterator[Finding]:
    """Environment variables of MLX, set by the worker at its start or by the user."""
    for standing in cast("list[dict[str, str]]", report.get("environment", [])):
        by = "set by the worker" if standing["by"] == "here" else "set by you"
        yield Finding("ok", "environment", f"{standing['name']}={standing['value']}, {by}: {standing['why']}")


def _blas(blas: str) -> Iterator[Finding]:
    if blas.startswith("reference"):
        text = "MLX's own BLAS is about five times slower than a tuned one"
        yield Finding("warn", "blas", text, "apt install libopenblas0-pthread")
    else:
        yield Finding("ok", "blas", f"BLAS {blas}")


def _memory(report: dict[str, object]) -> Iterator[Finding]:
    whole, limit = int(str(report["system_bytes"])), int(str(report["recommended_bytes"]))
    text = f"{whole / 2**30:.1f}G of memory, of which MLX may hold {limit / 2**30:.1f}G"
    if limit < _SMALL_LIMIT_BYTES:
        yield Finding("warn", "memory", text, "take a small model, or raise the container's limit")
    else:
        yield Finding("ok", "memory", text)
    if report["metal"] and limit < whole * 0.6:
        most = int(whole * 0.8 / 2**20)
        text = f"macOS lets the GPU wire {limit / 2**30:.1f}G"
        yield Finding("warn", "wired", text, f"for larger models: sudo sysctl iogpu.wired_limit_mb={most}")
