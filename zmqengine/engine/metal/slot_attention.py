"""Attention over slots on Metal: one kernel a layer for all pieces of few tokens, whatever their number and pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.slots import POOLS_MAX, SlotPool
from zmqengine.engine.models.attention import (
    WIDTH_MAX,
    MlxAttention,
    MlxPool,
    PlacedPiece,
    PoolLayout,
    layout_of,
    padded,
)
from zmqengine.engine.models.layers import HeadShape

DIMS = (64, 80, 96, 128, 256)
DTYPES = (mx.float16, mx.bfloat16)
LANES = 32
SIMDGROUPS = 8
"""Simdgroups of a threadgroup. Metal allows 1,024 threads, but fewer to a kernel with many registers; the sums of 8
simdgroups take 8 of 32 KB of threadgroup memory at 256 dimensions."""
# Numbers of a lane for the queries of a threadgroup, and as many for their sums: registers.
_LANE_NUMBERS_MAX = 32


class MetalLayout(NamedTuple):
    """A step: its pools, the table of its short tokens (None without any), and the index of each token in the outputs,
    None where they are in order."""

    pools: list[MlxPool]
    arrays: list[SlotPool]
    table: mx.array | None
    place: mx.array | None


class MetalAttention(MlxAttention):
    """`SlotAttention` by this kernel and MLX's operations."""

    reads_packed = False

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> MetalLayout:
        """See `SlotAttention`."""
        layouts = layout_of(pieces)
        pools = [layout.pool for layout in layouts]
        table: list[tuple[int, ...]] = []
        place = np.zeros(tokens, np.int32)
        first = 0
        for piece in pieces:
            slot = piece.slot
            if piece.count <= WIDTH_MAX:
                place[first : first + piece.count] = len(table) + np.arange(piece.count)
                table += [
                    (first + at, pools.index(slot.pool), slot.index, piece.start + at + 1, slot.capacity)
                    for at in range(piece.count)
                ]
            first += piece.count
        outputs = _place_prompts(layouts, place, len(table))
        in_order = outputs == tokens and bool((place == np.arange(tokens)).all())
        return MetalLayout(
            [self._pool(layout._replace(short=None)) for layout in layouts],
            pools + pools[:1] * (POOLS_MAX - len(pools)),
            mx.array(np.array(table, np.int32)) if table else None,
            None if in_order else mx.array(place),
        )

    def attend(self, layout: Any, layer: int, qkv: Sequence[mx.array]) -> mx.array:
        """See `SlotAttention`."""
        # These attend alone to what was written before.
        prompts = self._outputs(layout.pools, layer, qkv)
        outputs = []
        if layout.table is not None:
            cache_number = self._caches[layer]
            keys = [pool.keys[cache_number] for pool in layout.arrays]
            values = [pool.values[cache_number] for pool in layout.arrays]
            outputs = [attend_short(self._heads[layer], qkv[0], layout.table, keys, values)]
        outputs += prompts
        every = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return every if layout.place is None else every[layout.place]


def _place_prompts(layouts: Sequence[PoolLayout], place: np.ndarray, outputs: int) -> int:
    """Note where the outputs of prompts are, behind the first `outputs`; returns how many outputs there are."""
    for layout in layouts:
        for prompt in layout.prompts:
            first = layout.tokens.start + prompt.tokens
            place[first : first + prompt.count] = outputs + np.arange(prompt.count)
            outputs += padded(prompt.count)
    return outputs


def attend_short(
    heads: HeadShape,
    queries: mx.array,
    table: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
) -> mx.array:
    """Attention [rows, heads * dim] of the tokens in `table`, of which slot_attention.metal tells, over the arrays of
    `POOLS_MAX` pools."""
    group = heads.heads // heads.key_heads
    together = heads_together(group, heads.dim)
    sinks = heads.sinks if heads.sinks is not None else mx.zeros((1,), heads.dtype)
    template = [
        ("T", heads.dtype),
        ("D", heads.dim),
        ("GROUP", group),
        ("HEADS", together),
        ("KEY_HEADS", heads.key_heads),
        ("WINDOW", heads.window or 0),
        ("SINKS", heads.sinks is not None),
        ("CAPPED", heads.cap is not None),
        ("SIMDGROUPS", SIMDGROUPS),
    ]
    outputs: list[mx.array] = _kernel()(
        inputs=[queries, table, mx.array([heads.scale, heads.cap or 0.0]), sinks, *keys, *values],
        template=template,
        grid=(heads.heads // together * SIMDGROUPS * LANES, table.shape[0], 1),
        threadgroup=(SIMDGROUPS * LANES, 1, 1),
        output_shapes=[(table.shape[0], heads.heads * heads.dim)],
        output_dtypes=[heads.dtype],
    )
    return outputs[0]


def heads_together(group: int, dim: int) -> int:
    """Query heads of a threadgroup, of a `group` with the same keys: as many as the registers hold."""
    each = -(-dim // LANES)
    return max(
        count
        for count in range(1, group + 1)
        if group % count == 0 and (count == 1 or count * each <= _LANE_NUMBERS_MAX)
    )


def supports(layers: Sequence[HeadShape]) -> bool:
    """Whether the kernel supports all of these layers."""
    return all(
        heads.dim in DIMS
        and heads.dtype in DTYPES
        and heads.heads % heads.key_heads == 0
        and heads.value_dims is None
        for heads in layers
    )


@cache
def _kernel() -> Any:
    pools = range(POOLS_MAX)
    return mx.fast.metal_kernel(
        name="slot_attention",
        input_names=[
            *("queries", "tokens", "numbers", "sinks"),
            *(f"keys{pool}" for pool in pools),
            *(f"values{pool}" for pool in pools),
        ],
        output_names=["attended"],
        source=resources.files(__package__).joinpath("slot_attention.metal").read_text(),
    )
