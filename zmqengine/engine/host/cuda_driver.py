"""Questions to CUDA's driver that MLX does not ask."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

log = logging.getLogger("zmqengine.engine")


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
