"""Questions to CUDA's driver that MLX does not ask."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

log = logging.getLogger("zmqengine.engine")

# CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT of cuda.h.
_MULTIPROCESSORS = 16


@cache
def multiprocessors() -> int:
    """Multiprocessors of the device, each of which runs a thread block at least; 0 where the driver does not tell."""
    found = ctypes.c_int()

    def count(driver: ctypes.CDLL, device: ctypes.c_int) -> int:
        return int(driver.cuDeviceGetAttribute(ctypes.byref(found), _MULTIPROCESSORS, device))

    ask_driver(count, "the multiprocessors are not counted: an encoder of texts launches more kernels")
    return found.value


def ask_driver(call: Callable[[ctypes.CDLL, ctypes.c_int], int], without: str) -> None:
    """Call CUDA's driver, which returns 0, with the device; log `without` and the reason where that fails."""
    failed: object
    try:
        driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(device), 0) or call(driver, device)
    except (OSError, AttributeError) as error:
        failed = error
    if failed:
        log.info(without, extra={"reason": str(failed)})
