"""Table of the errors by which MLX reports a failure of the device, and the remedy for each. Imports no MLX.

Such an error does not implicate a row of the batch: it is raised at the next synchronisation. Metal's are `[METAL]
Command buffer execution failed: DESCRIPTION (CODE:NAME)`; they are raised and no longer abort the process since
github.com/ml-explore/mlx/pull/3523. CUDA's are `CALL failed: TEXT` with the text of `cudaGetErrorString`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Remedy = Literal["repeat", "exit"]
"""`repeat`: release caches and buffers, shrink the prefill chunk, and repeat the step with the same rows. `exit`: the
device or the CUDA context is not usable any more: end the process, and streams resume in the next one."""


class DeviceError(NamedTuple):
    """A kind of failure: a part of the error's text, a name for people, and the remedy."""

    text: str
    name: str
    remedy: Remedy


DEVICE_ERRORS = (
    # Time: the same chunk would fail in the next process too.
    DeviceError("CallbackErrorTimeout", "timeout", "repeat"),
    DeviceError("ImpactingInteractivity", "impacting interactivity", "repeat"),
    # Memory. 499,000 is Metal's limit on the number of buffers.
    DeviceError("CallbackErrorOutOfMemory", "out of memory", "repeat"),
    DeviceError("Resource limit (", "too many buffers", "repeat"),
    DeviceError("Unable to allocate", "out of memory", "repeat"),
    DeviceError("out of memory", "out of memory", "repeat"),
    DeviceError("MemoryError", "out of memory", "repeat"),
    DeviceError("bad_alloc", "out of memory", "repeat"),
    # Metal: work of this process or of another one has reset the GPU.
    DeviceError("CallbackErrorHang", "hang", "exit"),
    DeviceError("SubmissionsIgnored", "submissions ignored", "exit"),
    DeviceError("InnocentVictim", "victim of another process", "exit"),
    DeviceError("CallbackErrorPageFault", "page fault", "exit"),
    # CUDA: these destroy the context, and every later call fails.
    DeviceError("an illegal memory access was encountered", "illegal address", "exit"),
    DeviceError("misaligned address", "misaligned address", "exit"),
    DeviceError("an illegal instruction was encountered", "illegal instruction", "exit"),
    DeviceError("unspecified launch failure", "launch failure", "exit"),
    DeviceError("the launch timed out and was terminated", "launch timeout", "exit"),
    DeviceError("device-side assert triggered", "device assertion", "exit"),
    DeviceError("uncorrectable ECC error encountered", "uncorrectable memory error", "exit"),
)


def device_error(error: BaseException) -> DeviceError | None:
    """The row of the table for `error`; None if it may be the fault of a request."""
    text = f"{type(error).__name__}: {error}"
    return next((row for row in DEVICE_ERRORS if row.text in text), None)
