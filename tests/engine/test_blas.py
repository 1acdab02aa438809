"""A tuned BLAS is found before MLX is, and says its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zmqengine.engine.host.elf import drop_symbol_prefix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

# Prints what was found, then checks that MLX multiplies.
PROGRAM = """
import zmqengine.engine.host.blas as blas
{change}
print(blas.load_tuned_blas())
import mlx.core as mx, numpy as np
a, b = mx.random.normal((33, 65)), mx.random.normal((65, 17))
assert np.allclose(np.array(a @ b), np.array(a) @ np.array(b), atol=1e-4)
"""


def run(change: str = "", **environment: str) -> list[str]:
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change=change)],
        env={**os.environ, "ZMQENGINE_BLAS": "", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_none_keeps_what_mlx_has():
    """The way back."""
    assert run(ZMQENGINE_BLAS="none")[0] == "reference"


def test_a_path_that_cannot_be_loaded_is_an_error():
    """A wish is not silently ignored."""
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change="")],
        env={**os.environ, "ZMQENGINE_BLAS": "/no/such/library.so"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 1
    assert "/no/such/library.so" in child.stderr


def test_mlx_that_is_already_there_is_left_alone():
    """Too late to change anything."""
    assert run(change="import mlx.core")[0] == "as it was when mlx was imported"


def test_the_package_from_pypi_becomes_the_blas_of_mlx():
    """With only pip: scipy-openblas32, its names without their prefix, is what MLX's calls are bound to."""
    pytest.importorskip("scipy_openblas32")
    found = run(change="blas._NAMES = ()")
    assert "scipy_openblas32" in found[0]
    bound = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change="blas._NAMES = ()")],
        env={**os.environ, "ZMQENGINE_BLAS": "", "LD_DEBUG": "bindings"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stderr
    calls = [line for line in bound.splitlines() if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert calls
    assert all("/proc/self/fd/" in line for line in calls)


def test_without_any_the_reference_stays_and_the_text_says_what_to_do():
    """Slow, but it works."""
    assert "install" in run(change="blas._NAMES = (); blas._PACKAGE = 'no_such_package'")[0]


def test_a_renamed_library_is_still_found_by_all_its_names(tmp_path):
    """Every other name of the library is found as before, by the system's own reader of symbols."""
    package = pytest.importorskip("scipy_openblas32")
    original = next(Path(package.__path__[0], "lib").glob("libscipy_openblas*.so"))
    renamed = tmp_path / "renamed.so"
    renamed.write_bytes(drop_symbol_prefix(original.read_bytes(), b"scipy_cblas_", 6))
    code = (
        "import ctypes, sys; new = ctypes.CDLL(sys.argv[1])\n"
        "new.cblas_sgemm, new.cblas_zdotc_sub, new.scipy_openblas_get_config, new.scipy_dgemm_\n"
        "assert not hasattr(new, 'scipy_cblas_sgemm')\n"
        "assert not hasattr(new, 'cblas_nothing')\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(renamed)], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("library", [b"", b"\x7fELF\x01\x01" + bytes(60), b"MZ" + bytes(100)])
def test_what_is_no_such_library_is_refused(library):
    """An error, not a broken copy."""
    with pytest.raises(ValueError, match="not a 64-bit"):
        drop_symbol_prefix(library, b"a", 1)
