"""Memory of the device: MLX's limit, the allowance for padding, and the limit on wired memory."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import mlx.core as mx

from zmqengine.checkpoint.estimate import PADDING_BYTES_MIN
from zmqengine.engine.host.cuda_driver import ask_driver
from zmqengine.engine.options import WiredLimit

log = logging.getLogger("zmqengine.engine")

_BUFFER_CACHE_BYTES_MIN = 256 << 20
# Share of the limit for logits of a verify block. Sampling takes three times as much transiently, and a tenth of the
# limit is reserved for transient memory anyway.
_LOGITS_BYTES_MAX, _LOGITS_PART = 128 << 20, 32
# Share of the machine's memory for MLX; the rest is for the system and other programs.
_SHARE = 0.8
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")
# CU_MEMPOOL_ATTR_RELEASE_THRESHOLD of cuda.h.
_RELEASE_THRESHOLD = 4


def padding_allowance(parameter_bytes: int) -> int:
    """Maximum bytes of padding in all batches of rows.

    Up to the size of the weights, reading padding is cheaper than a second model call, which reads the weights again;
    at most a quarter of the memory limit without the weights.
    """
    left = (mx.get_memory_limit() - parameter_bytes) // 4
    return max(PADDING_BYTES_MIN, min(parameter_bytes, left))


def logits_allowance() -> int:
    """Maximum bytes of the float32 logits of one verify block, by the size of memory."""
    return min(_LOGITS_BYTES_MAX, mx.get_memory_limit() // _LOGITS_PART)


def recommended_bytes() -> int:
    """Bytes for MLX: Metal's recommendation, else most of the memory of the device or container."""
    facts = mx.device_info()
    if int(facts.get("max_recommended_working_set_size", 0)) > 0:
        return int(facts["max_recommended_working_set_size"])
    if int(facts.get("total_memory", 0)) > 0:
        return int(int(facts["total_memory"]) * _SHARE)
    return int(system_bytes() * _SHARE)


def system_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """Memory of this machine, or of this process's container if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(control_group.read_text()))
    except (OSError, ValueError):
        # No such file, or the word "max".
        return machine


def limit_mlx(memory_limit_bytes: int, parameter_bytes: int) -> None:
    """Set MLX's limits on memory and on freed buffers."""
    mx.set_memory_limit(memory_limit_bytes)
    mx.set_cache_limit(buffer_cache_bytes(memory_limit_bytes, parameter_bytes))
    if mx.cuda.is_available():
        _keep_mapped(memory_limit_bytes)


def release_buffers() -> None:
    """Give back the memory of arrays that are gone. The next step is a little slower; nothing is lost."""
    mx.clear_cache()


def buffer_cache_bytes(memory_limit_bytes: int, parameter_bytes: int) -> int:
    """Bytes of freed buffers that MLX may keep for reuse.

    By default MLX keeps all freed buffers up to the memory limit: 1.3 GB for a model of 0.1 GB were measured.
    """
    # On CUDA each allocation calls the driver, and the release of a buffer that the host wrote waits for the device.
    if mx.cuda.is_available():
        return memory_limit_bytes // 8
    # On a CPU slots are not MLX's, which does not free buffers for them: these are part of a step's workspace.
    most = memory_limit_bytes // (8 if mx.metal.is_available() else 16)
    return min(most, max(_BUFFER_CACHE_BYTES_MIN, parameter_bytes // 4))


def _keep_mapped(bytes_: int) -> None:
    """Have CUDA keep released memory of this process mapped, up to `bytes_` in all.

    MLX allocates from the default pool of the device (mlx/backend/cuda/allocator.cpp), which unmaps released memory
    whenever the host waits for the device. To map the arrays of a batch takes longer than a decode step.
    """

    def set_threshold(driver: ctypes.CDLL, device: ctypes.c_int) -> int:
        pool, most = ctypes.c_void_p(), ctypes.c_uint64(bytes_)
        failed: int = driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), device)
        return failed or int(driver.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(most)))

    ask_driver(set_threshold, "CUDA unmaps released memory: steps that copy a batch take longer")


class WiredMemory:
    """MLX's wired limit, set once the weights are loaded and put back by `restore`. Does nothing without Metal.

    Wired memory is never paged out, so an idle model stays fast. MLX wires every buffer that fits below the limit when
    it is allocated and unwires it when it is freed, each with a commit of the residency set. With room left, KV caches
    and temporaries are wired and unwired throughout every step, and macOS up to 26 panics under that load
    ("completeMemory() prepare count underflow", github.com/ml-explore/mlx/issues/3186). A limit that the weights fill
    leaves no room, so hardly any later buffer is wired.

    Two of three reported panics came right after the machine woke with wired weights
    (github.com/jundot/omlx/issues/978): `unwire` before it may sleep, and `wire` before the next step. Which buffers
    are wired then, MLX chooses.
    """

    def __init__(self, limit: WiredLimit = "weights") -> None:
        self.description = ""
        """The limit in words; empty without Metal."""
        self._limit_before: int | None = None
        self._follows = limit == "all"
        self._bytes = 0
        self._is_wired = False
        if not mx.metal.is_available():
            return
        self.description = str(limit)
        if limit in ("off", 0):
            return
        if limit == "weights":
            # Buffers left by loading would be wired with the weights.
            mx.clear_cache()
            wanted = mx.get_active_memory()
        else:
            wanted = mx.get_memory_limit() if limit == "all" else int(limit)
        self._bytes = min(wanted, int(mx.device_info()["max_recommended_working_set_size"]))
        self.description = f"{limit} ({self._bytes / (1 << 30):.2f} GiB)"
        self._limit_before = mx.set_wired_limit(self._bytes)
        self._is_wired = True

    def wire(self) -> None:
        """Wire as at first what `unwire` has let go. Idempotent."""
        if self._limit_before is not None and not self._is_wired:
            # Freed buffers would be wired in the place of weights.
            mx.clear_cache()
            mx.set_wired_limit(self._bytes)
            self._is_wired = True

    def unwire(self) -> None:
        """Let the system page everything, while the device computes nothing. Idempotent."""
        if self._limit_before is not None and self._is_wired:
            mx.synchronize()
            mx.set_wired_limit(0)
            self._is_wired = False

    def follow(self, memory_limit_bytes: int) -> None:
        """Lower the wired limit to a new memory limit, if it is `all`."""
        if self._follows and self._limit_before is not None:
            most = int(mx.device_info()["max_recommended_working_set_size"])
            self._bytes = min(memory_limit_bytes, most)
            if self._is_wired:
                mx.set_wired_limit(self._bytes)

    def restore(self) -> None:
        """Set the earlier limit. Idempotent."""
        if self._limit_before is not None:
            mx.synchronize()
            mx.set_wired_limit(self._limit_before)
            self._limit_before = None
