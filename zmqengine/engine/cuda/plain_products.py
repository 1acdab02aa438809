"""Products with weights in half precision on CUDA, by a kernel that reads the weights once for up to 32 rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text

PART = 64
"""Unit of a layer's inputs: `fits` wants a multiple."""

FEW_ROWS_MAX = 32

_TILES = (1, 2, 4)
WARPS = 4
"""Warps of a thread block, which share its inputs."""
ACTIVATIONS = ("", "silu", "gelu", "clamped silu")
"""Activations of a gated product, by their number in gated.cuh; without one it is not gated."""


class Cut(NamedTuple):
    """Tiling of a product: a thread block computes `tiles` of 8 rows by `columns`; its warps prefetch `stages`
    parts."""

    tiles: int
    columns: int
    stages: int

    @classmethod
    def of(cls, rows: int, outputs: int) -> Cut:
        """The fastest tiling on an H200, where the thread blocks of all columns should run at once on 132
        multiprocessors."""
        tiles = next(tiles for tiles in _TILES if rows <= 8 * tiles)
        if outputs <= (4_224 if tiles >= 4 else 8_448):
            return cls(tiles, 16, 4)
        if outputs <= 8_448 or tiles < 4:
            return cls(tiles, 32, 3)
        return cls(tiles, 64, 2)

    def shared_bytes(self, bits: int = 16) -> int:
        """Shared memory of a thread block for weights of `bits`: two fit on an H200, and one on every device of compute
        capability 8 or more, which has 99 KiB."""
        return WARPS * self.stages * (self.columns * bits + 8 * self.tiles * 16) * PART // 8

    def template(self, dtype: mx.Dtype, activation: str, *, biased: bool) -> list[tuple[str, Any]]:
        """Template arguments of few_rows.cu. `activation`: of a gated product, or empty."""
        return [
            ("T", dtype),
            ("TILES", self.tiles),
            ("COLUMNS", self.columns),
            ("STAGES", self.stages),
            ("WARPS", WARPS),
            ("GATED", ACTIVATIONS.index(activation)),
            ("BIASED", biased),
        ]


def fits(inputs: int, dtype: mx.Dtype) -> bool:
    """Whether `few_rows` supports weights with this number of inputs, of this type."""
    return inputs % PART == 0 and dtype in (mx.bfloat16, mx.float16)


def few_rows(
    inputs: mx.array, weights: mx.array, bias: mx.array | None = None, *, activation: str = ""
) -> mx.array:
    """The product of `inputs` [rows, inputs] and the transpose of `weights` [outputs, inputs]: [rows, outputs].

    A row's result does not depend on the number of rows. With an `activation`, that of the first half of the outputs
    times the other half: [rows, outputs / 2].
    """
    outputs, rows = weights.shape[0], inputs.shape[0]
    cut = Cut.of(rows, outputs)
    made = outputs // 2 if activation else outputs
    return _few_rows(cut, inputs.dtype, activation, None if bias is None else bias.dtype)(
        inputs=[inputs, weights, inputs if bias is None else bias],
        grid=(-(-outputs // cut.columns) * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(rows, made)],
    )[0]


def few_rows_text(rows: str, weights: str) -> str:
    """The kernel of products, for `all` rows or those of `experts`, and weights that are `plain` or `packed`."""
    return kernel_text(f"few_rows_{rows}.cu", "few_rows_begin.cu", f"few_rows_{weights}.cu", "few_rows.cu")


@lru_cache(maxsize=64)
def _few_rows(cut: Cut, dtype: mx.Dtype, activation: str, bias: mx.Dtype | None) -> Variant:
    kernel = Kernel(
        name="plain_product",
        # The rows stand for a bias that there is not.
        input_names=["x", "w", "output_bias"],
        output_names=["out"],
        source=few_rows_text("all", "plain"),
        header=kernel_text("tensor_cores.cuh", "copies_ahead.cuh", "gated.cuh"),
        shared_memory=cut.shared_bytes(),
    )
    template = cut.template(dtype, activation, biased=bias is not None)
    return kernel.variant(template, [dtype, dtype, bias or dtype], [dtype])
