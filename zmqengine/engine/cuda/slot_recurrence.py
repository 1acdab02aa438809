"""Recurrent layers of a step on CUDA, over the states of all rows, by the kernels of recurrence.py.

States are written in place. A verify block leaves those of its rows as they were, and the accepted tokens are computed
again before the row's next ones, by the same kernels: rollback is no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda.recurrence import (
    RecurrentPiece,
    delta_layer,
    short_conv,
    supports_convolution,
    supports_delta,
    tables,
)
from zmqengine.engine.kv.slots import StatePool
from zmqengine.engine.models.attention import PlacedPiece
from zmqengine.engine.models.recurrence import GatedDelta, ShortConvolution
from zmqengine.engine.models.slot_recurrence import RecurrentMixer


class RecurrentLayout(NamedTuple):
    """A step. `kind`: what traces are made for besides shapes; `shared` and `layers`: arrays that they take, for all
    layers and for each. `block`: the verify block of the step, if it has one."""

    kind: tuple[int, bool, bool]
    shared: list[mx.array]
    layers: Sequence[list[mx.array]]
    block: CudaVerifyBlock | None = None

    def hold(self, product: mx.array) -> None:
        """Note the product of the next layer."""
        if self.block is not None:
            self.block.products.append(product)


class CudaVerifyBlock:
    """`HeldBlock` of the last step. `products`: what each layer took, [tokens, ...]; `pieces`: by slot, the row's piece
    and the index of its first token."""

    def __init__(self, recurrence: CudaRecurrence, pool: StatePool) -> None:
        self._recurrence = recurrence
        self._pool = pool
        self.pieces: dict[int, tuple[PlacedPiece, int]] = {}
        self.products: list[mx.array] = []

    def kept(self) -> dict[int, RecurrentPiece]:
        """The accepted tokens of each row, alone."""
        return {
            index: RecurrentPiece(index, 0, begin, piece.accepted(), is_first=piece.start == 0)
            for index, (piece, begin) in self.pieces.items()
            if piece.accepted()
        }

    def apply(self) -> None:
        """See `HeldBlock`."""
        self._recurrence.apply(self._pool, self)

    def state_of(self, index: int) -> list[mx.array] | None:
        """See `HeldBlock`."""
        if index not in self.pieces:
            return None
        piece, begin = self.pieces[index]
        counts, tokens = mx.array([piece.accepted()], mx.int32), slice(begin, begin + piece.count)
        found: list[mx.array] = []
        for mixer, product, states in zip(
            self._recurrence.mixers, self.products, self._pool.arrays, strict=True
        ):
            before = [array[index : index + 1] for array in states]
            if piece.start == 0:
                before = [mx.zeros_like(array) for array in before]
            found += mixer.advance(product[None, tokens], before, counts)[1]
        return found

    def drop(self, index: int) -> None:
        """See `HeldBlock`."""
        self.pieces.pop(index, None)


class CudaRecurrence:
    """`SlotRecurrence` by these kernels."""

    is_replayed = True

    def __init__(self, mixers: Sequence[RecurrentMixer]) -> None:
        self.mixers = mixers

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> RecurrentLayout:
        """See `SlotRecurrence`."""
        pool = pieces[0].slot.states
        assert pool is not None, "the model has recurrent layers"
        held: Any = pool.block
        kept = {} if held is None else held.kept()
        block = CudaVerifyBlock(self, pool)
        together, begin = [], 0
        for piece in pieces:
            index = piece.slot.state
            before = kept.pop(index, RecurrentPiece(index, 0, is_first=piece.start == 0))
            together.append(replace(before, count=piece.count, is_draft=piece.verifies))
            if piece.verifies:
                block.pieces[index] = piece, begin
            begin += piece.count
        # Rows that are not in the step keep their accepted tokens too.
        together += kept.values()
        layout = self._layout(pool, together, tokens, held)
        pool.block = block if block.pieces else None
        return layout._replace(block=pool.block)

    def advance(self, layout: RecurrentLayout, layer: int, product: mx.array) -> mx.array:
        """See `SlotRecurrence`."""
        layout.hold(product)
        return self.advance_replayed(
            layout.kind, self.mixers[layer], product, *layout.shared, *layout.layers[layer]
        )

    def advance_replayed(
        self,
        kind: tuple[int, bool, bool],
        mixer: Any,
        product: mx.array,
        places: mx.array,
        tiles: mx.array,
        *arrays: mx.array,
    ) -> mx.array:
        """Outputs [tokens, ...] of a layer's product [tokens, ...]; depends on nothing else. Zeros for padding."""
        work, is_long, has_kept = kind
        kept, windows, *states = arrays if has_kept else (product, *arrays)
        if isinstance(mixer, ShortConvolution):
            return short_conv(mixer.weight, mixer.bias, product, kept, windows, places, tiles)
        one = (work, is_long), product, kept, windows, states[0], places, tiles
        return delta_layer(mixer.shape, mixer.weights, *one)

    def example(self, tokens: int) -> RecurrentLayout:
        """A step of as many rows in decode, to trace it before there is one."""
        kind, shared = tables([RecurrentPiece(-1, 1)] * tokens, tokens, 0)
        layers = [
            [mx.zeros((1, *each.shape), each.dtype) for each in mixer.state_shapes] for mixer in self.mixers
        ]
        return RecurrentLayout((*kind, False), shared, layers)

    def apply(self, pool: StatePool, block: CudaVerifyBlock) -> None:
        """Bring the states of all rows of a verify block up to their accepted tokens."""
        if kept := block.kept():
            layout = self._layout(pool, list(kept.values()), 1, block)
            # A step of one token, which is padding.
            mx.async_eval(  # type: ignore[no-untyped-call]
                [self.advance(layout, layer, product[:1]) for layer, product in enumerate(block.products)]
            )

    @staticmethod
    def _layout(
        pool: StatePool, pieces: Sequence[RecurrentPiece], tokens: int, held: CudaVerifyBlock | None
    ) -> RecurrentLayout:
        has_kept = any(piece.kept_count for piece in pieces)
        layers = _corners(pool)
        if has_kept:
            assert held is not None, "kept tokens are those of a verify block"
            layers = [[product, *own] for product, own in zip(held.products, layers, strict=True)]
        kind, shared = tables(pieces, tokens, layers[0][0].shape[0] if has_kept else 0)
        return RecurrentLayout((*kind, has_kept), shared, layers)


def supports(mixers: Sequence[RecurrentMixer]) -> bool:
    """Whether the kernels support all of these layers."""
    return all(
        (isinstance(mixer, GatedDelta) and supports_delta(mixer.shape, mixer.weights))
        or (isinstance(mixer, ShortConvolution) and supports_convolution(mixer.weight, mixer.bias))
        for mixer in mixers
    )


def _corners(pool: StatePool) -> list[list[mx.array]]:
    """The first slot of the states of each layer, in their memory: a trace is for one shape, and kernels find the other
    slots behind it."""
    if pool.views is None:
        pool.views = [[array[:1] for array in states] for states in pool.arrays]
        mx.async_eval(pool.views)  # type: ignore[no-untyped-call]
    corners: list[list[mx.array]] = pool.views
    return corners
