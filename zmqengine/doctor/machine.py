"""Python, MLX, the BLAS, memory and the clock."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmqengine
from zmqengine.doctor.finding import Finding
from zmqengine.doctor.macs import look_at_mac, releases_differ
from zmqengine.engine.host.machine_probe import probe_machine

_SMALL_LIMIT_BYTES = 2 << 30


class Machine(NamedTuple):
    """Findings of the machine, MLX's memory limit in bytes, 0 if that is not known, and MLX's report if it works."""

    findings: list[Finding]
    limit_bytes: int
    report: dict[str, Any] | None = None


def look_at_machine() -> Machine:
    """Look at Python, MLX, the BLAS, memory and the clock. MLX is imported in a child process."""
    findings = [_python(), *_clock()]
    if importlib.util.find_spec("mlx") is None:
        install = "pip install 'zmqengine[worker]' if a worker is to run here"
        return Machine([*findings, Finding("warn", "mlx", "MLX is not installed", install)], 0)
    probe = probe_machine()
    if probe.report is None:
        return Machine([*findings, Finding("fail", "mlx", probe.problem)], 0)
    report = probe.report
    findings += [*_mlx(report), *releases_differ(report["origin"]["packages"]), *look_at_mac(report)]
    findings += [*_environment(report), *_blas(str(report["blas"])), *_memory(report)]
    return Machine(findings, int(report["recommended_bytes"]), report)


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


def _mlx(report: dict[str, Any]) -> Iterator[Finding]:
    where = f"{report['device']} ({report['device_name'] or 'unnamed'})"
    worst = max(report["products"].values())
    yield Finding("ok", "mlx", f"MLX {report['mlx']} computes on {where}, products are exact to {worst:.1g}")
    try:
        version = importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("fail", "mlx-lm", "mlx-lm is not installed", "pip install 'zmqengine[worker]'")
        return
    oldest, newest = tested_mlx_lm()
    if newest and not _release(oldest) <= _release(version) <= _release(newest):
        text = f"mlx-lm {version} is not one of {oldest} to {newest}, with which the engine is tested"
        yield Finding("warn", "mlx-lm", text, f"pip install mlx-lm=={newest}")
    else:
        yield Finding("ok", "mlx-lm", f"mlx-lm {version}")


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


def _environment(report: dict[str, Any]) -> Iterator[Finding]:
    """Environment variables of MLX, set by the worker at its start or by the user."""
    for variable in report.get("environment", []):
        by = "set by the worker" if variable["by"] == "here" else "set by you"
        yield Finding("ok", "environment", f"{variable['name']}={variable['value']}, {by}: {variable['why']}")


def _blas(blas: str) -> Iterator[Finding]:
    if blas.startswith("reference"):
        text = "MLX's own BLAS is about five times slower than a tuned one"
        yield Finding("warn", "blas", text, "apt install libopenblas0-pthread")
    else:
        yield Finding("ok", "blas", f"BLAS {blas}")


def _memory(report: dict[str, Any]) -> Iterator[Finding]:
    whole, limit = int(report["system_bytes"]), int(report["recommended_bytes"])
    text = f"{whole / 2**30:.1f}G of memory, of which MLX may hold {limit / 2**30:.1f}G"
    if limit < _SMALL_LIMIT_BYTES:
        yield Finding("warn", "memory", text, "take a small model, or raise the container's limit")
    else:
        yield Finding("ok", "memory", text)
