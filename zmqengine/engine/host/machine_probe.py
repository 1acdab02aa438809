"""A question to MLX in a child process: does it compute here, and on which device?

Where there is no device, importing MLX ends the process: a Metal device list that is empty raises an Objective-C
exception (github.com/ml-explore/mlx/issues/2691, 3148, 3397). This page must not import MLX.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

REPORT_COMMAND = (sys.executable, "-m", "zmqengine.engine.host.machine_report")
PROBE_S = 120.0
"""For a first import of MLX from a slow disk, and the start of CUDA on a machine with many GPUs."""


class Probe(NamedTuple):
    """MLX's report of this machine; None with the `problem`, one sentence that says what to do.

    `is_certain` is False where another try may succeed: MLX did not answer in time.
    """

    report: dict[str, Any] | None
    problem: str = ""
    is_certain: bool = True


class _Cause(NamedTuple):
    """Texts of an error, any of which tells it, and the sentence for people."""

    texts: tuple[str, ...]
    sentence: str


_REINSTALL = "pip install --force-reinstall 'zmqengine[worker]'"
CAUSES = (
    _Cause(
        ("NSRangeException", "objectAtIndex", "No Metal device", "Metal device not found"),
        "no Metal device: log in at the Mac's screen once, and start the worker outside of sandboxes and of virtual "
        "machines without a GPU",
    ),
    # With the driver's library missing, or without a GPU behind it.
    _Cause(
        ("libcuda.so", "no CUDA-capable device", "cudaErrorNoDevice"),
        "no CUDA device: install NVIDIA's driver (nvidia-smi has to list the GPU), or without one "
        "pip uninstall mlx-cuda-12 mlx-cuda-13 and pip install 'zmqengine[worker]'",
    ),
    _Cause(
        ("CUDA driver version is insufficient", "cudaErrorInsufficientDriver"),
        "NVIDIA's driver is too old for this MLX: update it, or install mlx[cuda12] instead of mlx[cuda13]",
    ),
    _Cause(
        (
            "was built for newer macOS",
            "built for macOS",
            "metal language version",
            "is not supported in this OS",
        ),
        f"this MLX was built for another macOS: update macOS, or {_REINSTALL} on this one",
    ),
    # Parts of different releases: one package was updated and the other was not.
    _Cause(
        ("Symbol not found", "undefined symbol", "Library not loaded", "libmlx", "mlx.metallib"),
        f"parts of MLX do not belong together: {_REINSTALL}",
    ),
    _Cause(("wrong products",), f"MLX computes wrong results here: {_REINSTALL} from PyPI, and update macOS"),
)


def probe_machine(command: Sequence[str] = REPORT_COMMAND, *, timeout_s: float = PROBE_S) -> Probe:
    """Ask once. Never raises for what MLX does."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(None, f"MLX did not answer in {timeout_s:.0f} s: is the GPU hanging?", is_certain=False)
    if ended.returncode == 0:
        report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return Probe(report)
    lines = ended.stderr.strip().splitlines()
    told = lines[-1][:200] if lines else f"it ended with {_end_of(ended.returncode)}"
    for cause in CAUSES:
        if any(text in ended.stderr for text in cause.texts):
            return Probe(None, f"MLX does not work here: {cause.sentence} ({told})")
    return Probe(None, f"MLX does not work here ({told}): {_advice()}")


def _end_of(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _advice() -> str:
    if sys.platform == "linux":
        return "pip install 'zmqengine[worker]' for the CPU, or [cuda] with NVIDIA's driver"
    return _REINSTALL
