"""MLX's own kernels for CUDA that every model needs, compiled by child processes while a worker starts.

MLX compiles them at their first use, one after another, for 1 to 4 s each, and keeps them on disk. The children compile
them at once on a machine that has none, by tiny computations of the same types. Each writes to a directory of its own
and moves complete files, since MLX fails on a file that another process is writing. If one fails, or computes what MLX
compiles otherwise, MLX compiles in the worker as before. Only a child imports MLX.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zmqengine.engine.host.environment import cuda_version, settings
from zmqengine.python_child import python_command, python_environment

CHILDREN_MAX = 8
"""Each takes a core, and about 0.5 GB of the GPU while it runs."""
CHILDREN_S = 60.0
"""For all of them."""
_DIRECTORY = "MLX_PTX_CACHE_DIR"
# In a file of this suffix beside the kernels: a child has compiled it. MLX names fused kernels by their operations.
_DONE = ".compiled"


def names_for(dtype: str) -> list[str]:
    """Kernels that a start and usual traffic use for a model of this type, such as `bfloat16`: the slowest first.

    They are named as in mlx/backend/cuda/indexing.cpp; those of operations that `mx.compile` fuses begin otherwise.
    """
    names = [
        "gather_axis_float32_int32",
        "gather_axis_float32_uint32",
        "gather_axis_uint32_uint32",
        f"gather_axis_{dtype}_uint32",
        f"mask_{dtype}",
        "scatter_float32_int32_Assign_1",
        "scatter_float32_int64_Sum_2",
        "scatter_uint32_int32_Assign_1",
        f"silu_{dtype}",
        f"silu_shapeless_{dtype}",
        f"gather_{dtype}_uint32_1",
        f"gather_{dtype}_int32_1",
        "gather_uint32_int32_1",
        "gather_uint32_int64_2",
        "gather_uint32_uint32_1",
        "gather_float32_int32_1",
        "gather_bool_int32_1",
    ]
    return list(dict.fromkeys(names))


def computation(mx: Any, name: str) -> Any:
    """An array whose computation needs the kernel `name`."""
    kind, *types = name.split("_")
    if kind == "mask":
        import numpy as np

        from zmqengine.engine.grammar.mask import MaskFiller

        return MaskFiller(64, [0]).apply(mx.zeros((2, 64), getattr(mx, types[0])), np.ones((2, 2), np.uint32))
    if kind == "silu":
        from mlx.nn.layers.activations import silu

        def gated(gate: Any, up: Any) -> Any:
            return silu(gate) * up

        half = mx.ones((2, 64), getattr(mx, types[-1]))
        return mx.compile(gated, shapeless=types[0] == "shapeless")(half, half)
    if types[0] == "axis":
        dtype, index = (getattr(mx, one) for one in types[1:])
        return mx.take_along_axis(mx.zeros((2, 2), dtype), mx.zeros((2, 2), index), axis=1)
    dtype = mx.bool_ if types[0] == "bool" else getattr(mx, types[0])
    array, count = mx.zeros((2, 2, 2, 2), dtype), int(types[-1])
    at = (mx.zeros((2,), getattr(mx, types[1])),) * count
    if kind == "gather":
        return array[at]
    if types[2] == "Sum":
        return array.at[at].add(1)
    array[at] = mx.ones((2, *array.shape[count:]), array.dtype)
    return array


def start_children(dtype: str) -> Callable[[], None] | None:
    """Start child processes for the kernels that this machine does not have; returns the wait for their end.

    None where there is nothing to compile, as without CUDA.
    """
    directory = _cache_directory()
    missing = [] if directory is None else _missing(directory, dtype)
    if not missing:
        return None
    count = min(len(missing), CHILDREN_MAX, os.cpu_count() or 1)
    children = [
        subprocess.Popen(
            python_command(__name__, str(directory), *missing[first::count]),
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(count)
    ]

    until_s = time.monotonic() + CHILDREN_S

    def wait() -> None:
        for child in children:
            try:
                child.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    return wait


def main(directory: Path, names: Sequence[str]) -> None:
    """Compile these kernels into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        os.environ[_DIRECTORY] = aside
        import mlx.core as mx

        for name in names:
            mx.eval(computation(mx, name))
            # The code last: MLX looks for it first.
            for suffix in (".cu", ".txt", ".ptx"):
                for path in sorted(Path(aside).glob(f"*{suffix}")):
                    path.replace(directory / path.name)
            (directory / f"{name}{_DONE}").touch()


def _cache_directory() -> Path | None:
    if not cuda_version():
        return None
    ours = {setting.name: setting.value for setting in settings()}
    return Path(os.environ.get(_DIRECTORY) or ours[_DIRECTORY])


def _missing(directory: Path, dtype: str) -> list[str]:
    return [
        name
        for name in names_for(dtype)
        if not any((directory / f"{name}{suffix}").exists() for suffix in (_DONE, ".ptx"))
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
