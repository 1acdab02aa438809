"""Kernels of CUDA C++ on the CPU: their text is compiled by g++, with what they use of CUDA in cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.cuda.kernel_text import kernel_text

COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_suffix(".h")
_NUMPY: dict[mx.Dtype, Any] = {mx.float32: np.float32, mx.float16: np.float16, mx.int32: np.int32}
_NAN_BFLOAT16 = 0x7FC0
_DIMS_MAX = 10


def run(
    text: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    shapes: Sequence[tuple[int, ...]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> list[mx.array]:
    """The outputs of a kernel, given its text with its head as MLX generates it. It may write into its inputs.

    What it does not write is not a number.
    """
    kernel, name = _compiled(text)
    arrays = [(name, memory(words(array))) for name, array in inputs]
    made = [unwritten(shape, dtype) for shape, (_, dtype) in zip(shapes, outputs, strict=True)]
    given = []
    for one, array in arrays:
        given.append(array)
        for suffix, numbers, kind in (
            ("shape", array.shape, np.int32),
            ("strides", [step // array.itemsize for step in array.strides], np.int64),
        ):
            if f"{one}_{suffix}," in text:
                given.append(np.array([*numbers, *[0] * (_DIMS_MAX - len(numbers))], kind))
    given += made
    pointers = (ctypes.c_void_p * len(given))(*(array.ctypes.data for array in given))
    blocks = [threads // size for threads, size in zip(grid, threadgroup, strict=True)]
    kernel[name](pointers, *blocks, threadgroup[0])
    found = [mx.array(array) for array in made]
    return [
        array.view(dtype) if dtype == mx.bfloat16 else array
        for array, (_, dtype) in zip(found, outputs, strict=True)
    ]


def memory(array: mx.array) -> np.ndarray:
    """The memory of `array`, to be changed without MLX's knowledge."""
    mx.eval(array)
    mx.synchronize()
    return np.array(array, copy=False)


def words(array: mx.array) -> mx.array:
    # NumPy has no bfloat16. The view shares the array's memory.
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.bfloat16:
        return np.full(shape, _NAN_BFLOAT16, np.uint16)
    return np.full(shape, -1 if dtype == mx.int32 else np.nan, _NUMPY[dtype])


def compiled(program: str) -> ctypes.CDLL:
    """The library of a C++ program."""
    directory = Path(tempfile.mkdtemp(prefix="kernel-on-cpu-"))
    try:
        source, library = directory / "kernel.cpp", directory / "kernel.so"
        source.write_text(program)
        subprocess.run(
            [str(COMPILER), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)],
            check=True,
        )
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(directory)


@cache
def _compiled(text: str) -> tuple[ctypes.CDLL, str]:
    """The library of a kernel, and the name of its function, which takes pointers to the kernel's arguments."""
    found = re.search(r"__global__ void (\w+)\((.*?)\) \{", text, re.DOTALL)
    assert found is not None
    name, parameters = found.groups()
    kinds = [re.sub(r" \w+$", "", one.strip()) for one in parameters.split(",")]
    call = ", ".join(
        f"({kind})arguments[{place}]"
        if kind.endswith("*")
        else f"*(mlx::core::cu::{kind.split()[-1]}*)arguments[{place}]"
        for place, kind in enumerate(kinds)
    )
    body = re.sub(r"#include.*\n", "", text)
    # The header stands in for PTX instructions, and for the shared memory whose size the launch gives.
    for header in ("tensor_cores.cuh", "copies_ahead.cuh"):
        body = body.replace(kernel_text(header), "")
    body = body.replace("extern __shared__ uint4 shared_start[];", "")
    program = (
        f'#include "{_HEADER}"\n{body}\n'
        f'extern "C" void {name}(void** arguments, int x, int y, int z, int threads) {{\n'
        f"  launch(Dim{{x, y, z}}, threads, [&] {{ mlx::core::cu::{name}({call}); }});\n}}\n"
    )
    return compiled(program), name
