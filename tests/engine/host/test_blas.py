"""A tuned BLAS is found before MLX is, and says its name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


def test_without_any_the_reference_stays_and_the_text_says_what_to_do():
    """Slow, but it works."""
    assert "install" in run(change="blas._NAMES = ()")[0]
