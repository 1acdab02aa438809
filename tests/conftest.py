"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Thousands of modules and tests are made, and none of them goes: no need to look for garbage among them all the time.
gc.disable()

# Hundreds of processes start in a run: they compile a source once, even where a shell says that nobody keeps bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# With TF32 a GPU of NVIDIA rounds products of one row otherwise than those of many, and greedy tokens differ. Workers
# that are started here inherit it.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Sockets of tests lie in their directories, and the path of one has 103 bytes: macOS' own place is too long for it.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")

# Several processes share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.compiler import precompile_header  # noqa: E402
from zmqengine.engine.host.blas import load_tuned_blas  # noqa: E402

# MLX binds to a BLAS when it is imported: engines of this process compute as those of workers do.
load_tuned_blas()

# A shared or virtual CPU pauses at will: a slow example is not a failing one.
_PATIENT: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=20, **_PATIENT)
settings.register_profile("ci", max_examples=30, **_PATIENT)
settings.register_profile("long", max_examples=3_000, **_PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

OPTIONS = (
    "ZMQENGINE_WORKER_",
    "ZMQENGINE_HTTP_",
    "ZMQENGINE_ADDRESS",
    "ZMQENGINE_CLIENT_KEY",
    "ZMQENGINE_SERVER_KEY",
)


def pytest_configure(config: pytest.Config) -> None:
    """Each process of a run keeps its workers and what they cache in a directory of its own, with no user's options.

    So runs beside each other on one machine do not meet, and none finds what an earlier one has left.
    """
    for name in [name for name in os.environ if name.startswith(OPTIONS)]:
        del os.environ[name]
    # Short, for the path of a socket has 103 bytes.
    directory = tempfile.mkdtemp(prefix="zmqe-", dir="/tmp")
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ["ZMQENGINE_DIR"] = directory
    os.environ["ZMQENGINE_CACHE_DIR"] = os.path.join(directory, "cache")
    # The processes of a run inherit it from the one that starts them.
    if config.getoption("numprocesses", None):
        precompile_header(Path(directory))


# Modules of the extra `programs` that whole test files need.
PROGRAMS = {"anthropic", "ollama", "openai"}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Without the extra `programs`, skip the files that import one of them."""
    report = yield
    error = getattr(report.call.excinfo, "value", None) if report.call else None
    cause = getattr(error, "__cause__", None)
    if isinstance(cause, ModuleNotFoundError) and cause.name in PROGRAMS:
        report.outcome = "skipped"
        report.longrepr = (
            str(collector.path),
            1,
            f"Skipped: {cause.name} is not installed (extra `programs`)",
        )
        report.call = None
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: a long one that starts last keeps all other processes waiting."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What has been collected stays, and is not looked at again."""
    gc.freeze()
    gc.enable()
