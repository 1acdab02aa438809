"""Probe of MLX in a child process: whether it computes on this machine, and on which device.

Without a device, importing MLX ends the process: an empty list of Metal devices raises an Objective-C exception
(github.com/ml-explore/mlx/issues/2691, 3148, 3397). This module must not import MLX.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zmqengine.engine.host.device_errors import device_error
from zmqengine.python_child import python_command, python_environment

REPORT_COMMAND = python_command("zmqengine.engine.host.machine_report")
PROBE_S = 120.0
"""Time-out of the probe: a first import of MLX from a slow disk, and the start of CUDA with many GPUs."""


class Probe(NamedTuple):
    """MLX's report of this machine; None with a `problem`, one sentence with a remedy.

    `is_certain` is False where another try may succeed: MLX did not answer in time, or the device failed.
    """

    report: dict[str, Any] | None
    problem: str = ""
    is_certain: bool = True


class _Cause(NamedTuple):
    """Texts that identify an error, and its sentence for people."""

    texts: tuple[str, ...]
    sentence: str


_REINSTALL = "pip install --force-reinstall 'zmqengine[worker]'"
CAUSES = (
    _Cause(
        ("NSRangeException", "objectAtIndex", "No Metal device", "Metal device not found"),
        "no Metal device: log in at the Mac's screen once, and start the worker outside of sandboxes and of virtual "
        "machines without a GPU",
    ),
    # The driver's library is missing, or there is no GPU.
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
    # Packages of different releases: one was updated and the other was not.
    _Cause(
        ("Symbol not found", "undefined symbol", "Library not loaded", "libmlx", "mlx.metallib"),
        f"MLX's packages are of different releases: {_REINSTALL}",
    ),
    _Cause(("wrong products",), f"MLX computes wrong results here: {_REINSTALL} from PyPI, and update macOS"),
)


def probe_machine(
    command: Sequence[str] = REPORT_COMMAND,
    *,
    timeout_s: float = PROBE_S,
    beside: Callable[[], None] = lambda: None,
) -> Probe:
    """Run the probe once, and `beside` while it runs. Raises nothing for a failure of MLX."""
    with subprocess.Popen(
        command, env=python_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            beside()
            output, errors = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return Probe(
                None, f"MLX did not answer in {timeout_s:.0f} s: is the GPU hanging?", is_certain=False
            )
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        report: dict[str, Any] = json.loads(output.splitlines()[-1])
        return Probe(report)
    lines = errors.strip().splitlines()
    message = lines[-1][:200] if lines else f"it ended with {_end_of(child.returncode)}"
    for cause in CAUSES:
        if any(text in errors for text in cause.texts):
            return Probe(None, f"MLX does not work here: {cause.sentence} ({message})")
    # A device that is full or that another process has brought down may be well at the next try.
    is_certain = device_error(RuntimeError(errors)) is None
    return Probe(None, f"MLX does not work here ({message}): {_advice()}", is_certain)


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
