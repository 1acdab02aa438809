"""Products with weights in half precision on CUDA, by kernels that read the weights once for all rows.

`few_rows` is for up to 40 rows and any device with tensor cores; `many_rows` is for a Hopper and any number: of more
than 160 rows it reads the weights once for each 160.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.kernel_text import kernel_text

PART = 64
"""Inputs of a layer are a multiple of it."""

FEW_ROWS_MAX = 40
OUTPUTS = 4
"""Outputs of a layer are a multiple of it for `many_rows`."""

_TILES = (1, 2, 4, 5)
_WARPS = 4
_ROWS = (40, 80, 160)
_GROUP = 128
_STAGES_BYTES = 212 << 10
_MULTIPROCESSORS = 132
# From so many outputs on, and with no more inputs, one group of warps a block is as fast as blocks that share the
# inputs, whose sums have to be added.
_OUTPUTS_WHOLE_MIN = 4096
_INPUTS_WHOLE_MAX = 8192
# Blocks of products that are cut: each more of them is another part to add.
_BLOCKS_CUT = 80
_JOINING = 256


class Cut(NamedTuple):
    """How a product of few rows is cut: `tiles` of 8 rows, and `columns` a block, whose warps copy `stages` parts
    ahead."""

    tiles: int
    columns: int
    stages: int

    @classmethod
    def of(cls, rows: int, outputs: int) -> Cut:
        """The fastest one on an H200, where blocks of all columns are to find room at once on 132 multiprocessors."""
        tiles = next(tiles for tiles in _TILES if rows <= 8 * tiles)
        if outputs <= (4_224 if tiles >= 4 else 8_448):
            return cls(tiles, 16, 3 if tiles > 4 else 4)
        if outputs <= 8_448 or tiles < 4:
            return cls(tiles, 32, 3)
        return cls(tiles, 64, 2)

    @property
    def shared_bytes(self) -> int:
        """What a block needs of shared memory: so much that two find room on an H200. Up to 32 rows every device of
        compute capability 8 or more has it, 99 KiB."""
        return _WARPS * self.stages * (self.columns + 8 * self.tiles) * PART * 2


class WideCut(NamedTuple):
    """How a product of many rows is cut: a block has memory for `rows` and makes `groups` of 64 columns, and `splits`
    of them share the inputs, whose products are added."""

    rows: int
    groups: int
    splits: int

    @classmethod
    def of(cls, rows: int, inputs: int, outputs: int, *, may_cut: bool = False) -> WideCut:
        """The fastest one on an H200: a block has a multiprocessor to itself, and most of these have one. Where parts
        are added anyway, it `may_cut` the inputs for less."""
        held = next((held for held in _ROWS if rows <= held), _ROWS[-1])
        if outputs > 2 * 64 * _MULTIPROCESSORS:
            return cls(held, 4, 1)
        is_enough = _OUTPUTS_WHOLE_MIN <= outputs <= 64 * _MULTIPROCESSORS and inputs <= _INPUTS_WHOLE_MAX
        if is_enough and not may_cut:
            return cls(held, 1, 1)
        blocks = -(-outputs // 128)
        return cls(held, 2, max(1, min(round(_BLOCKS_CUT / blocks), inputs // PART // 8)))

    @property
    def stages(self) -> int:
        """How many parts of 64 inputs find room in shared memory."""
        return _STAGES_BYTES // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """What a block needs of shared memory; it holds the sums at the end."""
        return max(self.stages * self._stage_bytes, self.rows * (64 * self.groups + 4) * 4)

    @property
    def _stage_bytes(self) -> int:
        return (64 * self.groups + self.rows) * PART * 2


def few_rows(inputs: mx.array, weights: mx.array, *, gated: bool = False) -> mx.array:
    """The product of `inputs` [rows, inputs] and `weights` [outputs, inputs] turned, of the same type: [rows, outputs].

    What a row gives does not depend on how many there are. If `gated`, silu of the first half of the outputs times the
    other half: [rows, outputs / 2].
    """
    outputs, rows = weights.shape[0], inputs.shape[0]
    cut = Cut.of(rows, outputs)
    made = outputs // 2 if gated else outputs
    done = _few_rows(cut.shared_bytes)(
        inputs=[inputs, weights],
        template=[
            ("T", inputs.dtype),
            ("TILES", cut.tiles),
            ("COLUMNS", cut.columns),
            ("STAGES", cut.stages),
            ("WARPS", _WARPS),
            ("GATED", gated),
        ],
        grid=(-(-outputs // cut.columns) * _WARPS * 32, 1, 1),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, made)],
        output_dtypes=[inputs.dtype],
    )
    return done[0]  # type: ignore[no-any-return]


def many_rows(inputs: mx.array, weights: mx.array) -> mx.array:
    """The same for any number of rows, with the products of a Hopper's groups of four warps."""
    found = _by_cut(WideCut.of(inputs.shape[0], *reversed(weights.shape)), inputs, weights)
    if found.ndim == 2:
        return found
    _, rows, outputs = found.shape
    done = _join()(
        inputs=[found],
        template=[("T", inputs.dtype)],
        grid=(-(-rows * outputs // OUTPUTS // _JOINING) * _JOINING, 1, 1),
        threadgroup=(_JOINING, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[inputs.dtype],
    )
    return done[0]  # type: ignore[no-any-return]


def parts_of_many_rows(inputs: mx.array, weights: mx.array) -> mx.array:
    """The same as it is, [rows, outputs], or in parts that are yet to be added, [parts, rows, outputs] in float32."""
    return _by_cut(WideCut.of(inputs.shape[0], *reversed(weights.shape), may_cut=True), inputs, weights)


def many_rows_gated(inputs: mx.array, weights: mx.array) -> mx.array | None:
    """As `few_rows` if `gated`; None where a product would be in parts."""
    cut = WideCut.of(inputs.shape[0], *reversed(weights.shape))
    is_whole = cut.splits == 1 and weights.shape[0] % (2 * OUTPUTS) == 0
    return _by_cut(cut, inputs, weights, gated=True) if is_whole else None


def _by_cut(cut: WideCut, inputs: mx.array, weights: mx.array, *, gated: bool = False) -> mx.array:
    outputs, rows = weights.shape[0], inputs.shape[0]
    made = outputs // 2 if gated else outputs
    whole = cut.splits == 1
    columns = -(-outputs // (64 * cut.groups))
    done = _many_rows(cut.shared_bytes)(
        inputs=[inputs, weights],
        template=[
            ("T", inputs.dtype),
            ("ROWS", cut.rows),
            ("GROUPS", cut.groups),
            ("STAGES", cut.stages),
            ("WHOLE", whole),
            ("GATED", gated),
        ],
        grid=(columns * -(-rows // cut.rows) * cut.groups * _GROUP, cut.splits, 1),
        threadgroup=(cut.groups * _GROUP, 1, 1),
        output_shapes=[(rows, made) if whole else (cut.splits, rows, outputs)],
        output_dtypes=[inputs.dtype if whole else mx.float32],
    )
    return done[0]  # type: ignore[no-any-return]


@cache
def _few_rows(shared_bytes: int) -> Any:
    return mx.fast.cuda_kernel(
        name="plain_product",
        input_names=["x", "w"],
        output_names=["out"],
        source=kernel_text("plain_product.cu"),
        header=kernel_text("tensor_cores.cuh", "plain_product.cuh"),
        shared_memory=shared_bytes,
    )


@cache
def _many_rows(shared_bytes: int) -> Any:
    return mx.fast.cuda_kernel(
        name="wide_product",
        input_names=["x", "w"],
        output_names=["out"],
        source=kernel_text("wide_product.cu"),
        header=kernel_text("plain_product.cuh", "wide_product.cuh"),
        shared_memory=shared_bytes,
    )


@cache
def _join() -> Any:
    return mx.fast.cuda_kernel(
        name="wide_product_join",
        input_names=["parts"],
        output_names=["out"],
        source=kernel_text("wide_product_join.cu"),
    )
