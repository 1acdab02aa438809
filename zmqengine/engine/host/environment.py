"""Variables that MLX reads when it starts, for a server that runs for weeks. This page must not import MLX.

Each has a reason and a source; one that the user has set stays as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from zmqengine.paths import cache_directory

TF32_VARIABLE = "MLX_ENABLE_TF32"
# A list of those that are older: a chip that is not known here is newer.
_OLDER_CHIP = re.compile(r"Apple M[1-4]\b")


class Setting(NamedTuple):
    """A variable with the value that suits this machine, why, and who found that out."""

    name: str
    value: str
    why: str
    source: str


class Standing(NamedTuple):
    """How a variable stands: `by` is `here` for one of ours, `you` for one that was set before."""

    name: str
    value: str
    by: str
    why: str


_TF32 = Setting(
    TF32_VARIABLE,
    "0",
    "products of float32 are exact, so that a row has the same tokens alone and among others; --tf32 for speed",
    "github.com/ml-explore/mlx/issues/3860, /pull/3883: 1 if not set",
)


def prepare_environment() -> list[Standing]:
    """Set what is not set, before MLX is imported; says how each variable stands. Later calls change nothing."""
    if "mlx.core" in sys.modules:
        return standing(settings(), os.environ)
    found = []
    for setting in settings():
        by = "you" if setting.name in os.environ else "here"
        value = os.environ.setdefault(setting.name, setting.value)
        found.append(Standing(setting.name, value, by, setting.why))
    return found


def standing(wanted: list[Setting], environment: Mapping[str, str]) -> list[Standing]:
    """How the variables stand in an environment that nobody may change any more."""
    return [
        Standing(
            setting.name,
            environment.get(setting.name, "not set"),
            "here" if environment.get(setting.name) == setting.value else "you",
            setting.why,
        )
        for setting in wanted
    ]


def settings() -> list[Setting]:
    """Settings that suit this machine."""
    if sys.platform == "darwin":
        return list(_metal(_chip()))
    return list(_cuda()) if cuda_version() else []


def cuda_version() -> str:
    """The release of MLX's CUDA package; empty where there is none."""
    for package in ("mlx-cuda-13", "mlx-cuda-12"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def _cuda() -> Iterator[Setting]:
    yield _TF32
    # mlx/backend/cuda/lru_cache.h: twice as many misses as a cache is large, ever, and the process is ended.
    yield Setting(
        "MLX_ENABLE_CACHE_THRASHING_CHECK",
        "0",
        "MLX ends the process when its caches have missed often, which a server that runs for weeks does",
        "github.com/ml-explore/mlx/issues/2600",
    )
    yield Setting(
        "MLX_USE_CUDA_GRAPHS",
        "0",
        "a step with a chunk of prompts has a shape of its own, and a graph made for it takes longer than the step",
        "mlx/backend/cuda/device.cpp; benchmarks/log/2026-11.md",
    )
    yield Setting(
        "MLX_CUDA_SDPA_CACHE_SIZE",
        "1024",
        "plans for attention over prompts stay ready: each takes cuDNN 50 ms",
        "mlx/backend/cuda/scaled_dot_product_attention.cpp: 256 if not set",
    )
    yield Setting(
        "MLX_PTX_CACHE_DIR",
        str(cache_directory() / "mlx" / (cuda_version() or "unknown") / "ptx"),
        "compiled kernels outlive a restart of the machine: some take half a minute to compile",
        "mlx/backend/cuda/jit_module.cpp: in the directory for temporary files if not set",
    )


def _metal(chip: str) -> Iterator[Setting]:
    # MLX_METAL_FAST_SYNCH is left alone: it is faster and can lock up the GPU until the next start of the machine
    # (github.com/ml-explore/mlx/pull/4005, /issues/3142, /issues/3830).
    yield _TF32
    if _OLDER_CHIP.match(chip):
        # MLX_MAX_MB_PER_BUFFER is left alone: larger buffers hold the temporaries of a whole prefill chunk at once
        # (github.com/vllm-project/vllm-metal/pull/637). They gain nothing on M5 (github.com/lablup/mlxcel/issues/353).
        yield Setting(
            "MLX_MAX_OPS_PER_BUFFER",
            "200",
            "fewer command buffers a decode step on chips before M5; more would come near the 5 s that macOS gives one",
            "github.com/ml-explore/mlx/issues/4521, /issues/3267: 40 to 50 if not set, 1000 was the fastest",
        )


def _chip() -> str:
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
