"""Products with quantised weights on CUDA: kernels that read them once for up to 64 rows, and one that dequantises.

MLX's kernel that dequantises reaches a third of the speed of memory: a third of a step with a prefill chunk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.plain_products import WARPS, Cut, few_rows_text
from zmqengine.engine.models.layers import Linear

ROWS_MAX = 64
"""Maximum rows of `few_rows`."""

_BITS = (4, 8)
_GROUPS = (32, 64, 128)
# Unit of a layer's inputs.
_PART = 64
# Bytes of a row that a lane takes at a time, as do the other three that share it.
_LANE_BYTES, _LANES = 16, 4
_THREADS, _EACH = 256, 4
# Up to these rows, weights go from memory to registers; for more, rows and weights are copied ahead to shared memory.
# The products of a layer of 8B at 8, 32, 64 rows on an H200: 145, 216, 370 us the one way, 173, 247, 317 the other.
_FROM_REGISTERS_MAX = 32
_COLUMNS, _WARPS = 32, 8


def fits(linear: Linear) -> bool:
    """Whether the kernels support these weights, for inputs of their type."""
    if linear.inputs % _PART or linear.dtype not in (mx.bfloat16, mx.float16):
        return False
    is_affine = linear.mode == "affine" and linear.bits in _BITS and linear.group_size in _GROUPS
    return is_affine or linear.mode == "mxfp4"


class Packing(NamedTuple):
    """How weights are packed, as a kernel is compiled for it; `dtype`: their type in full width."""

    dtype: mx.Dtype
    bits: int
    group_size: int
    is_mxfp4: bool

    @classmethod
    def of(cls, linear: Linear) -> Packing:
        """That of a product."""
        return cls(linear.dtype, linear.bits, linear.group_size, linear.mode == "mxfp4")

    @property
    def template(self) -> list[tuple[str, Any]]:
        """Template arguments of kernels that unpack, but for the type."""
        return [("BITS", self.bits), ("GROUP", self.group_size), ("MXFP4", self.is_mxfp4)]

    @property
    def arrays(self) -> list[mx.Dtype]:
        """The types of `packed_arrays`."""
        return [mx.uint32, *[mx.uint8 if self.is_mxfp4 else self.dtype] * 2]


def packed_arrays(linear: Linear) -> list[mx.array]:
    """Quantised weights as the kernels take them: with their scales and biases. Scales stand for missing biases."""
    assert linear.scales is not None, "quantised weights have scales"
    return [linear.weight, linear.scales, linear.scales if linear.biases is None else linear.biases]


def few_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """The product of `inputs` [rows, inputs] and the transpose of the weights of `linear`, with its bias, on tensor
    cores: [rows, outputs]."""
    rows, outputs = inputs.shape[0], linear.outputs
    bias = None if linear.bias is None else linear.bias.dtype
    packing = Packing.of(linear), bias
    # A warp takes so many inputs at a time.
    are_even = linear.inputs % (_LANES * _LANE_BYTES * 8 // linear.bits) == 0
    if rows <= _FROM_REGISTERS_MAX and are_even:
        tiles, columns, warps = next(tiles for tiles in (1, 2, 4) if rows <= 8 * tiles), _COLUMNS, _WARPS
        variant = _from_registers(tiles, *packing)
    else:
        cut = cut_of(rows)
        columns, warps = cut.columns, WARPS
        variant = _few_rows(cut, *packing)
    return variant(
        inputs=[inputs, *packed_arrays(linear), inputs if linear.bias is None else linear.bias],
        grid=(-(-outputs // columns) * warps * 32, 1, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(rows, outputs)],
    )[0]


def cut_of(rows: int) -> Cut:
    """The tiling for a number of rows: a thread block takes them all, and as many columns as its registers allow."""
    tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
    return Cut(tiles, 32, 4) if tiles <= 2 else Cut(tiles, 64, 3 if tiles == 4 else 2)


def dequantised(linear: Linear) -> mx.array:
    """Weights in full width, [outputs, inputs]."""
    outputs, inputs = linear.outputs, linear.inputs
    (found,) = _dequantise(Packing.of(linear))(
        inputs=packed_arrays(linear),
        grid=(-(-outputs * inputs // (8 * _EACH * _THREADS)) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(outputs, inputs)],
    )
    return found


@lru_cache(maxsize=64)
def _dequantise(packing: Packing) -> Variant:
    kernel = Kernel(
        name="dequantise",
        input_names=["w", "scales", "biases"],
        output_names=["out"],
        source=kernel_text("dequantise.cu"),
        header=kernel_text("tensor_cores.cuh", "unpack.cuh"),
    )
    template = [("T", packing.dtype), *packing.template, ("THREADS", _THREADS), ("EACH", _EACH)]
    return kernel.variant(template, packing.arrays, [packing.dtype])


@lru_cache(maxsize=64)
def _from_registers(tiles: int, packing: Packing, bias: mx.Dtype | None) -> Variant:
    kernel = Kernel(
        name="quantised_product",
        input_names=["x", "w", "scales", "biases", "output_bias"],
        output_names=["out"],
        source=kernel_text("quantised_product.cu"),
        header=kernel_text("tensor_cores.cuh", "unpack.cuh"),
    )
    template = [
        ("T", packing.dtype),
        *packing.template,
        ("TILES", tiles),
        ("WARPS", _WARPS),
        ("BIASED", bias is not None),
    ]
    return kernel.variant(template, [packing.dtype, *packing.arrays, bias or packing.dtype], [packing.dtype])


@lru_cache(maxsize=64)
def _few_rows(cut: Cut, packing: Packing, bias: mx.Dtype | None) -> Variant:
    kernel = Kernel(
        name="packed_product",
        input_names=["x", "w", "scales", "biases", "output_bias"],
        output_names=["out"],
        source=few_rows_text("all", "packed"),
        header=kernel_text("tensor_cores.cuh", "copies_ahead.cuh", "gated.cuh", "unpack.cuh"),
        shared_memory=cut.shared_bytes(packing.bits),
    )
    template = [*cut.template(packing.dtype, "", biased=bias is not None), *packing.template]
    return kernel.variant(template, [packing.dtype, *packing.arrays, bias or packing.dtype], [packing.dtype])
