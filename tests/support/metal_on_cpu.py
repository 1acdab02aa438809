"""Kernels of the Metal Shading Language on the CPU: their text is compiled by g++, with metal_on_cpu.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.support.cuda_on_cpu import compiled, memory, unwritten, words

_HEADER = Path(__file__).with_suffix(".h")
_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.int32: "int"}
_BUFFERS_MAX = 31
"""Buffers of a kernel, as Metal allows."""
_CONSTANT_MAX = 8
"""Smaller inputs are in constant memory, where MLX puts them."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have these for `mx.fast.metal_kernel` from now on; returns the names of those that are called."""
    called: list[str] = []

    def metal_kernel(
        *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str
    ) -> Any:
        assert len(input_names) + len(output_names) <= _BUFFERS_MAX

        def call(
            *,
            inputs: Sequence[mx.array],
            template: Sequence[tuple[str, Any]],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
        ) -> list[mx.array]:
            assert threadgroup[0] <= 1024
            assert all(not threads % size for threads, size in zip(grid, threadgroup, strict=True))
            called.append(name)
            # MLX copies inputs whose memory is not in order.
            arrays = [words(mx.contiguous(array)) for array in inputs]
            mx.eval(arrays)
            made = [
                unwritten(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]
            parameters = [
                f"const {'constant' if array.size < _CONSTANT_MAX else 'device'} {_TYPES[array.dtype]}* {each}"
                for each, array in zip(input_names, inputs, strict=True)
            ]
            parameters += [
                f"device {_TYPES[dtype]}* {each}"
                for each, dtype in zip(output_names, output_dtypes, strict=True)
            ]
            constants = "".join(_constant(each, value) for each, value in template)
            run = _compiled(source, tuple(parameters), constants)
            given = [*map(memory, arrays), *made]
            pointers = (ctypes.c_void_p * len(given))(*(array.ctypes.data for array in given))
            blocks = [threads // size for threads, size in zip(grid, threadgroup, strict=True)]
            run(pointers, *blocks, threadgroup[0])
            results = [mx.array(array) for array in made]
            return [
                result.view(dtype) if dtype == mx.bfloat16 else result
                for result, dtype in zip(results, output_dtypes, strict=True)
            ]

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    return called


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};\n"
    return f"using {name} = {_TYPES[value]};\n"


@cache
def _compiled(source: str, parameters: tuple[str, ...], constants: str) -> Any:
    arguments = "".join(
        f"{one} = ({one.rpartition(' ')[0]})arguments[{place}];\n" for place, one in enumerate(parameters)
    )
    program = (
        f'#include "{_HEADER}"\n{constants}'
        f'extern "C" void run(void** arguments, int x, int y, int z, int threads) {{\n{arguments}'
        f"launch(Dim{{x, y, z}}, threads, [&] {{\n{source}\n}});\n}}\n"
    )
    return compiled(program).run
