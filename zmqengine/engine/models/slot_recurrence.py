"""Recurrent layers of a step, over the states of all rows.

Pieces of few tokens advance together, one call for all slots of the pool: those without a token are left alone by
neutral ones, so arrays are replaced and nothing is gathered, scattered or copied. A piece of a prompt advances in a
call of its own.

**Verify blocks need no rollback.** How many tokens of a block count is known once it has landed. So it leaves the
states as they were, and what its layers took is held (`HeldVerifyBlock`); the accepted tokens are applied before the
next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import ArrayShape, StatePool
from zmqengine.engine.models.attention import WIDTH_MAX, PlacedPiece, padded


class RecurrentMixer(Protocol):
    """A recurrent layer between its products: a named tuple of weights."""

    @property
    def outputs(self) -> int:
        """Numbers of a token that `advance` gives."""
        ...

    @property
    def dtype(self) -> mx.Dtype:
        """Their type."""
        ...

    @property
    def state_shapes(self) -> tuple[ArrayShape, ...]:
        """The state of a row."""
        ...

    def advance(
        self, product: mx.array, states: Sequence[mx.array], counts: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """Outputs [rows, width, ...] of a product [rows, width, ...], and `states` [rows, ...] after the first `counts`
        [rows] tokens of each row (all)."""
        ...


class SlotRecurrence(Protocol):
    """Recurrence of a back-end, over the states of one model."""

    is_replayed: bool
    """Whether `advance` is a function of arrays alone, which a trace may contain."""

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> Any:
        """The layout of a step of these pieces, padded to `tokens`; for `advance`."""
        ...

    def advance(self, layout: Any, layer: int, product: Any) -> Any:
        """Outputs [tokens, ...] of a recurrent layer's product [tokens, ...], whose states advance."""
        ...


class _Prompt(NamedTuple):
    """A piece that advances alone. `tokens`: index of each, padded; `counts` [1]: those that are no padding."""

    slot: int
    is_first: bool
    tokens: mx.array
    counts: mx.array


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step. `short` [slots, width]: index of each token of short pieces, and their numbers by slot in `counts`.

    `is_held`: the short pieces are a verify block. `after`: index of each slot's states in those of the pool, followed
    by those of the prompts; None without prompts. `place`: index of each token in all outputs.
    """

    pool: StatePool
    short: mx.array | None
    counts: mx.array
    is_held: bool
    prompts: list[_Prompt]
    after: mx.array | None
    place: mx.array


class HeldVerifyBlock:
    """`HeldBlock` of the last step. `products`: what each layer took, [slots, width, ...]; `rows`: by slot, the row's
    piece, whose `accepted` tokens count."""

    def __init__(
        self, mixers: Sequence[RecurrentMixer], pool: StatePool, pieces: dict[int, PlacedPiece]
    ) -> None:
        self._mixers = mixers
        self._pool = pool
        self._pieces = pieces
        self.products: list[mx.array] = []

    def apply(self) -> None:
        """See `HeldBlock`."""
        counts = np.zeros(self._pool.rows, np.int32)
        for index, piece in self._pieces.items():
            counts[index] = piece.accepted()
        if counts.any():
            array = mx.array(counts)
            self._pool.arrays = [
                mixer.advance(product, states, array)[1]
                for mixer, product, states in zip(self._mixers, self.products, self._pool.arrays, strict=True)
            ]

    def state_of(self, index: int) -> list[mx.array] | None:
        """See `HeldBlock`."""
        piece = self._pieces.get(index)
        if piece is None:
            return None
        counts, one = mx.array([piece.accepted()], mx.int32), slice(index, index + 1)
        return [
            state
            for mixer, product, states in zip(self._mixers, self.products, self._pool.arrays, strict=True)
            for state in mixer.advance(product[one], [each[one] for each in states], counts)[1]
        ]

    def drop(self, index: int) -> None:
        """See `HeldBlock`."""
        self._pieces.pop(index, None)


class MlxRecurrence:
    """`SlotRecurrence` by documented MLX operations, on every device."""

    is_replayed = False

    def __init__(self, mixers: Sequence[RecurrentMixer]) -> None:
        self._mixers = mixers

    def begin(self, pieces: Sequence[PlacedPiece], tokens: int) -> _Layout:
        """See `SlotRecurrence`."""
        pool = pieces[0].slot.states
        assert pool is not None, "the model has recurrent layers"
        pool.settle()
        counts = [piece.count for piece in pieces]
        begins = np.cumsum(counts) - counts
        place = np.zeros(tokens, np.int32)
        # A row's first tokens begin with no state: they advance alone, however few.
        together = [
            (piece, int(begin))
            for piece, begin in zip(pieces, begins, strict=True)
            if piece.count <= WIDTH_MAX and piece.start
        ]
        short, width, taken = None, 0, np.zeros(pool.rows, np.int32)
        if together:
            width = max(piece.count for piece, _ in together)
            index = np.zeros((pool.rows, width), np.int32)
            for piece, begin in together:
                slot = piece.slot.state
                taken[slot] = piece.count
                index[slot] = begin + np.minimum(np.arange(width), piece.count - 1)
                place[begin : begin + piece.count] = slot * width + np.arange(piece.count)
            short = mx.array(index)
        is_held = any(piece.verifies for piece, _ in together)
        if is_held:
            pool.block = HeldVerifyBlock(
                self._mixers, pool, {piece.slot.state: piece for piece, _ in together}
            )
        outputs = pool.rows * width
        prompts: list[_Prompt] = []
        after = np.arange(pool.rows, dtype=np.int32)
        for piece, begin in zip(pieces, begins, strict=True):
            if piece.count <= WIDTH_MAX and piece.start:
                continue
            wide = padded(piece.count) if piece.count > WIDTH_MAX else few_sizes(piece.count)
            index = int(begin) + np.minimum(np.arange(wide), piece.count - 1)
            after[piece.slot.state] = pool.rows + len(prompts)
            prompts.append(
                _Prompt(
                    piece.slot.state, piece.start == 0, mx.array(index), mx.array([piece.count], mx.int32)
                )
            )
            place[begin : begin + piece.count] = outputs + np.arange(piece.count)
            outputs += wide
        return _Layout(
            pool,
            short,
            mx.array(taken),
            is_held,
            prompts,
            mx.array(after) if prompts else None,
            mx.array(place),
        )

    def advance(self, layout: _Layout, layer: int, product: mx.array) -> mx.array:
        """See `SlotRecurrence`."""
        mixer, pool = self._mixers[layer], layout.pool
        before = pool.arrays[layer]
        outputs: list[mx.array] = []
        after = before
        if layout.short is not None:
            chosen = product[layout.short]
            found, advanced = mixer.advance(chosen, before, layout.counts)
            outputs.append(found.reshape(-1, found.shape[-1]))
            if layout.is_held:
                assert isinstance(pool.block, HeldVerifyBlock), "begin holds the block"
                pool.block.products.append(chosen)
            else:
                after = advanced
        ends = []
        for prompt in layout.prompts:
            one = slice(prompt.slot, prompt.slot + 1)
            states = [mx.zeros_like(each[one]) if prompt.is_first else each[one] for each in before]
            found, advanced = mixer.advance(product[prompt.tokens][None], states, prompt.counts)
            outputs.append(found[0])
            ends.append(advanced)
        if layout.after is not None:
            after = [
                mx.concatenate([states, *own])[layout.after]
                for states, own in zip(after, zip(*ends, strict=True), strict=True)
            ]
        pool.arrays[layer] = list(after)
        return mx.concatenate(outputs)[layout.place] if len(outputs) > 1 else outputs[0][layout.place]
