"""MLX that does not work here is one sentence, whatever it does to the process that imports it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from zmqengine.engine.host.machine_probe import probe_machine
from zmqengine.engine.host.machine_report import packages, product_errors

mx = pytest.importorskip("mlx.core")

NO_METAL = """
*** Terminating app due to uncaught exception 'NSRangeException', reason: '*** -[__NSArray0 objectAtIndex:]: index 0 \
beyond bounds for empty array'
*** First throw call stack:
libc++abi: terminating due to uncaught exception of type NSException
"""
OTHER_MACOS = (
    "ImportError: dlopen(core.so): Symbol not found (built for macOS 26.2 which is newer than running OS)"
)


@pytest.mark.parametrize(
    ("stderr", "end", "sentence"),
    [
        (NO_METAL, "os.abort()", "no Metal device: log in"),
        ("RuntimeError: [metal] No Metal device found", "sys.exit(1)", "no Metal device"),
        (
            "ImportError: libcuda.so.1: cannot open shared object file",
            "sys.exit(1)",
            "install NVIDIA's driver",
        ),
        (
            "cudaMalloc failed: no CUDA-capable device is detected",
            "sys.exit(1)",
            "nvidia-smi has to list the GPU",
        ),
        ("CUDA driver version is insufficient for CUDA runtime version", "sys.exit(1)", "driver is too old"),
        (OTHER_MACOS, "sys.exit(1)", "built for another macOS"),
        (
            "ImportError: core.so: undefined symbol: _ZN3mlx4core",
            "sys.exit(1)",
            "packages are of different releases",
        ),
        (
            "RuntimeError: Failed to load the default metallib. mlx.metallib",
            "sys.exit(1)",
            "packages are of different releases",
        ),
        (
            "ArithmeticError: wrong products: {'16 rows float16': 0.7}",
            "sys.exit(1)",
            "computes wrong results",
        ),
        ("", "os.kill(os.getpid(), 4)", "it ended with SIGILL"),
        ("something new", "sys.exit(3)", "does not work here (something new)"),
    ],
)
def test_each_way_to_fail_has_its_sentence(stderr: str, end: str, sentence: str) -> None:
    """One line that says what to do."""
    no_dump = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    program = f"{no_dump}; sys.stderr.write({stderr!r}); sys.stderr.flush(); {end}"
    probe = probe_machine((sys.executable, "-c", program))
    assert probe.report is None
    assert probe.is_certain
    assert sentence in probe.problem
    assert "\n" not in probe.problem


def test_a_probe_that_hangs_is_no_verdict() -> None:
    """A busy machine may be slow to import MLX: the worker tries all the same."""
    probe = probe_machine((sys.executable, "-c", "import time; time.sleep(600)"), timeout_s=0.2)
    assert probe.report is None
    assert not probe.is_certain


def test_a_device_that_failed_is_no_verdict() -> None:
    """Another process may have filled it or brought it down: the next try may succeed."""
    error = (
        "[METAL] Command buffer execution failed: (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"
    )
    probe = probe_machine((sys.executable, "-c", f"import sys; sys.exit({error!r})"))
    assert "InnocentVictim" in probe.problem
    assert not probe.is_certain


def test_this_machine_computes_as_numpy_does() -> None:
    """And says which packages it has that from."""
    report = probe_machine().report
    assert report is not None
    assert max(report["products"].values()) < 0.01
    assert packages()["mlx"]["version"] == report["mlx"]


@pytest.mark.parametrize("wrong", [1.5, float("nan")])
def test_products_that_are_wrong_are_found(wrong: float) -> None:
    """In one shape and one type alone; a NaN is an error too."""

    class Miscompiled:
        float32, float16 = np.float32, np.float16

        @staticmethod
        def array(values: np.ndarray) -> np.ndarray:
            return np.full_like(values, wrong) if values.shape[0] == 720 else values

    errors = product_errors(Miscompiled)
    assert errors["16 rows float16"] < 0.01
    assert errors["720 rows float32"] > 0.5


def test_other_work_goes_on_beside_the_probe(tmp_path: Path) -> None:
    """Which waits for it here."""
    done = tmp_path / "done"
    program = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)\nprint('{{}}')"
    assert probe_machine((sys.executable, "-c", program), beside=done.touch).report == {}


def test_a_signal_during_other_work_ends_the_probe() -> None:
    """Whatever the child does."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_machine((sys.executable, "-c", "import time; time.sleep(600)"), beside=interrupted)
