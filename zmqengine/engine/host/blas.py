"""A tuned BLAS for MLX on Linux CPUs, where MLX's wheel carries the slow reference one.

MLX calls `cblas_sgemm` and two others by name. A library that has these names and is loaded into the global
namespace before MLX is the one that gets called. This page must not import MLX.

OpenBLAS takes as many threads as there are cores; OPENBLAS_NUM_THREADS, set before the start, changes that. One
thread is best for models of a few million parameters.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

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
# The wheel in which NumPy's and SciPy's developers publish OpenBLAS. Its names all begin with `scipy_`.
_PACKAGE = "scipy_openblas32"
_PREFIX = b"scipy_cblas_"
_PREFIX_DROPPED = len(b"scipy_")


def load_tuned_blas() -> str:
    """Load a tuned BLAS if this system needs one and has one; returns what MLX will use, for people.

    It looks at ZMQENGINE_BLAS, then for OpenBLAS, MKL or BLIS where Linux keeps them and in the Python
    environment, then for the package scipy-openblas32. It does nothing on macOS, which has Accelerate, and nothing
    when MLX is already imported. Raises OSError if the library that ZMQENGINE_BLAS names cannot be loaded.
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
    for path in _system_libraries():
        if _load(path):
            return path
    return _load_package() or "reference (slow: install libopenblas0-pthread or scipy-openblas32)"


def _system_libraries() -> Iterator[str]:
    folders = (f"{sys.prefix}/lib", *_FOLDERS)
    for name in _NAMES:
        yield name
        for folder in folders:
            if os.path.exists(f"{folder}/{name}"):
                yield f"{folder}/{name}"


def _load(path: str) -> bool:
    try:
        # Looked at before it is made global: a library without these names is left alone.
        ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL).cblas_sgemm  # noqa: B018
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError):
        return False
    return True


def _load_package() -> str | None:
    """The fallback: load scipy-openblas32 from a copy in memory whose names have lost their prefix."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    from zmqengine.engine.host.elf import drop_symbol_prefix

    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            try:
                renamed = drop_symbol_prefix(path.read_bytes(), _PREFIX, _PREFIX_DROPPED)
                file = os.memfd_create("openblas")
                with open(file, "wb", closefd=False) as copy:
                    copy.write(renamed)
                if _load(f"/proc/self/fd/{file}"):
                    return str(path)
            except (OSError, ValueError):
                continue
    return None
