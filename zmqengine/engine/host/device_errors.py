"""Table of the errors by which MLX reports a failure of the device, and the remedy for each. Imports no MLX.

Such an error does not implicate a row of the batch: it is raised at the next synchronisation. Metal's are `[METAL]
Command buffer execution failed: DESCRIPTION (CODE:NAME)`; they are raised and no longer abort the process since
github.com/ml-explore/mlx/pull/3523. CUDA's are `CALL failed: TEXT` with the text of `cudaGetErrorString`. One of
either kind that is not in the table ends the process: a request is not ended for what nobody knows.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Remedy = Literal["repeat", "once", "shrink", "exit"]
"""`repeat`: release caches and buffers, shrink the prefill chunk, and repeat the step with the same rows. `once`: the
same, but `exit` if another one came within `ONCE_S`. `shrink`: the same as long as the chunk shrinks; then it may be
the fault of a request. `exit`: the device or the CUDA context is not usable any more: end the process, and streams
resume in the next one."""

ONCE_S = 60.0
"""After a third timeout macOS ignores what a process submits (github.com/jundot/omlx/issues/3706): the second within
a minute ends it."""


class DeviceError(NamedTuple):
    """A kind of failure: a part of the error's text, a name for people, the remedy, and whether the memory of cached
    prompts would not help."""

    text: str
    name: str
    remedy: Remedy
    keeps_prompts: bool = False


DEVICE_ERRORS = (
    # Time: the same chunk would fail in the next process too.
    DeviceError("CallbackErrorTimeout", "timeout", "once", keeps_prompts=True),
    DeviceError("ImpactingInteractivity", "impacting interactivity", "repeat", keeps_prompts=True),
    # Memory. 499,000 is Metal's limit on the number of buffers.
    DeviceError("CallbackErrorOutOfMemory", "out of memory", "repeat"),
    DeviceError("Resource limit (", "too many buffers", "repeat"),
    DeviceError("greater than the maximum allowed buffer size", "too large a buffer", "shrink"),
    DeviceError("Unable to allocate", "out of memory", "repeat"),
    DeviceError("out of memory", "out of memory", "repeat"),
    DeviceError("MemoryError", "out of memory", "repeat"),
    DeviceError("bad_alloc", "out of memory", "repeat"),
    # Metal: work of this process or of another one has reset the GPU.
    DeviceError("CallbackErrorHang", "hang", "exit"),
    DeviceError("SubmissionsIgnored", "submissions ignored", "exit"),
    DeviceError("InnocentVictim", "victim of another process", "exit"),
    DeviceError("CallbackErrorPageFault", "page fault", "exit"),
    # A buffer that was freed under a command (github.com/ml-explore/mlx/issues/3688, /issues/3868).
    DeviceError("CallbackErrorInvalidResource", "invalid resource", "exit"),
    DeviceError("Command buffer execution failed", "unknown", "exit"),
    # CUDA: these destroy the context, and every later call fails.
    DeviceError("an illegal memory access was encountered", "illegal address", "exit"),
    DeviceError("misaligned address", "misaligned address", "exit"),
    DeviceError("an illegal instruction was encountered", "illegal instruction", "exit"),
    DeviceError("unspecified launch failure", "launch failure", "exit"),
    DeviceError("the launch timed out and was terminated", "launch timeout", "exit"),
    DeviceError("device-side assert triggered", "device assertion", "exit"),
    DeviceError("uncorrectable ECC error encountered", "uncorrectable memory error", "exit"),
)

UNKNOWN_CUDA = DeviceError("failed: ", "unknown", "exit")

_CUDA_CALL = re.compile(r"\bcu(da|blas|dnn|blasLt)?[A-Z]\w*\(.*\) failed: ")
_OF_A_KERNEL = (
    "too many resources requested for launch",
    "invalid configuration argument",
    "invalid argument",
)
"""Refusals of a launch or a copy by its arguments, which follow from shapes: the context stays usable."""


def device_error(error: BaseException) -> DeviceError | None:
    """The row of the table for `error`; None if it may be the fault of a request."""
    text = f"{type(error).__name__}: {error}"
    known = next((row for row in DEVICE_ERRORS if row.text in text), None)
    if known is None and _CUDA_CALL.search(text) and not any(refusal in text for refusal in _OF_A_KERNEL):
        return UNKNOWN_CUDA
    return known
