"""A tuned BLAS for MLX on Linux CPUs, where MLX's wheel carries the slow reference one.

MLX calls `cblas_sgemm` and two others by name. A library with these symbols that is loaded into the global namespace
before MLX takes precedence. This module must not import MLX.

OpenBLAS uses a thread for each core; OPENBLAS_NUM_THREADS, set before the start, changes that. One thread is fastest
for models of a few million parameters.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

# A path to load, or `none` to keep what MLX has.
VARIABLE = "ZMQENGINE_BLAS"

_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so", "libmkl_rt.so.2", "libblis.so.4")
# On Debian these are found by the loader only where they are the chosen alternative.
_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu/openblas-pthread",
    "/usr/lib/aarch64-linux-gnu/openblas-pthread",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def load_tuned_blas() -> str:
    """Load a tuned BLAS on Linux; returns its path, or a description of the BLAS that MLX uses instead.

    ZMQENGINE_BLAS names one; otherwise OpenBLAS, MKL and BLIS are searched for in the system's library directories and
    in the Python environment. Does nothing on macOS, which has Accelerate, and nothing when MLX is already imported.
    Raises OSError if the library that ZMQENGINE_BLAS names cannot be loaded.
    """
    if sys.platform != "linux":
        return "accelerate"
    if "mlx.core" in sys.modules:
        return "as it was when mlx was imported"
    wish = os.environ.get(VARIABLE, "")
    if wish == "none":
        return "reference"
    if wish:
        ctypes.CDLL(wish, mode=ctypes.RTLD_GLOBAL)
        return wish
    if path := tuned_blas():
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        return path
    return "reference (slow: install libopenblas0-pthread)"


def tuned_blas() -> str:
    """The tuned BLAS of this system, as the loader takes it; empty without one."""
    return next(filter(_has_products, _system_libraries()), "")


def _system_libraries() -> Iterator[str]:
    folders = (f"{sys.prefix}/lib", *_FOLDERS)
    for name in _NAMES:
        yield name
        for folder in folders:
            if os.path.exists(f"{folder}/{name}"):
                yield f"{folder}/{name}"


def _has_products(path: str) -> bool:
    try:
        # Not into the global namespace: a library without these symbols must not come before MLX's own.
        ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL).cblas_sgemm  # noqa: B018
    except (OSError, AttributeError):
        return False
    return True
