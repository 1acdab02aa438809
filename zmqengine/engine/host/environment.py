"""Environment variables that MLX reads at its start, set for a long-running server. This module must not import MLX.

Each has a reason and a source; a value set by the user is not changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zmqengine.paths import cache_directory

TF32_VARIABLE = "MLX_ENABLE_TF32"
# Chips before M5: a name that is not in the list is a newer chip.
_OLDER_CHIP = re.compile(r"Apple M[1-4]\b")


class Setting(NamedTuple):
    """A variable, its value for this machine, the reason, and the source."""

    name: str
    value: str
    why: str
    source: str


class EnvironmentVariable(NamedTuple):
    """An environment variable and its value; `by`: `here` if this module set it, `you` if it was set before."""

    name: str
    value: str
    by: str
    why: str


_TF32 = Setting(
    TF32_VARIABLE,
    "0",
    "float32 products without TF32, so that a row has the same tokens alone and in a batch; --tf32 for speed, which "
    "encoders have anyway",
    "github.com/ml-explore/mlx/issues/3860, /pull/3883: 1 if not set",
)

_set_here: set[str] = set()


def prepare_environment() -> list[EnvironmentVariable]:
    """Set unset variables before MLX is imported; returns all of them. Later calls change nothing."""
    if "mlx.core" in sys.modules:
        return variables_in(settings(), os.environ)
    variables = []
    for setting in settings():
        if setting.name not in os.environ:
            _set_here.add(setting.name)
        by = "here" if setting.name in _set_here else "you"
        value = os.environ.setdefault(setting.name, setting.value)
        variables.append(EnvironmentVariable(setting.name, value, by, setting.why))
    return variables


def choose_tf32_of_encoders() -> EnvironmentVariable | None:
    """The variable of TF32, set to 1 unless the user set it, as encoders draw no tokens; None where it is unset.

    To be called before the first product of float32, when MLX reads it (`enable_tf32` in mlx/utils.h).
    """
    if TF32_VARIABLE not in os.environ:
        return None
    by = "here" if TF32_VARIABLE in _set_here else "you"
    if by == "here":
        os.environ[TF32_VARIABLE] = "1"
    return EnvironmentVariable(TF32_VARIABLE, os.environ[TF32_VARIABLE], by, "encoders draw no tokens")


def allows_tf32() -> bool:
    """Whether products of float32 may round factors to TF32."""
    return os.environ.get(TF32_VARIABLE) != "0"


def variables_in(wanted: list[Setting], environment: Mapping[str, str]) -> list[EnvironmentVariable]:
    """The wanted variables as they are in `environment`, which must not be changed any more."""
    return [
        EnvironmentVariable(
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
    """The release of MLX's CUDA package; empty without one."""
    # An import as long as that of the rest of this module, and a worker on the fake engine does not ask.
    from importlib.metadata import PackageNotFoundError, version

    for package in ("mlx-cuda-13", "mlx-cuda-12"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def expects_gpu() -> bool:
    """Whether MLX computes on a GPU, as far as its packages tell."""
    return sys.platform == "darwin" or bool(cuda_version())


def _cuda() -> Iterator[Setting]:
    yield _TF32
    # mlx/backend/cuda/lru_cache.h: MLX aborts once the misses of a cache reach twice its size.
    yield Setting(
        "MLX_ENABLE_CACHE_THRASHING_CHECK",
        "0",
        "MLX ends the process after a number of cache misses, which a long-running server reaches",
        "github.com/ml-explore/mlx/issues/2600",
    )
    yield Setting(
        "MLX_USE_CUDA_GRAPHS",
        "0",
        "each step with a prefill chunk has a new shape, and building a graph for it takes longer than the step",
        "mlx/backend/cuda/device.cpp; benchmarks/log/2026-11.md",
    )
    yield Setting(
        "MLX_CUDA_SDPA_CACHE_SIZE",
        "1024",
        "caches plans for attention over prompts: each takes cuDNN 50 ms",
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
            "fewer command buffers for small models on chips before M5; MLX commits those of large ones by their size",
            "github.com/ml-explore/mlx/issues/4521, /issues/3267: 40 to 50 if not set; mlx/backend/metal/device.cpp",
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
