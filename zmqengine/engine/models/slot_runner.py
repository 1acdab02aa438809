"""Runs our own decoder: every piece of a step in one forward pass, over slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.block_layout import Parts, SlotBlocks
from zmqengine.engine.kv.eight_bits import group_size
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import Carry, KVShape, Slot, Slots
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.attention import WIDTH_MAX, PlacedPiece
from zmqengine.engine.models.decoder import DecoderModel, Inputs, Queries
from zmqengine.engine.models.draft_head import (
    AnyHead,
    AnyWeights,
    AssistantWeights,
    BlockWeights,
    DraftAssistant,
    DraftBlock,
    DraftHead,
)
from zmqengine.engine.models.model_runner import FeatureSource, Outputs, RowPiece
from zmqengine.engine.models.ops import AddedProducts
from zmqengine.engine.row import Row

Choose = Callable[[mx.array, int], mx.array]
"""Tokens [rows] from logits [rows, vocab], so many tokens after a row's known ones."""


class StepAdapters(Protocol):
    """The adapters of a decoder. `weights` are its own with their factors."""

    @property
    def weights(self) -> DecoderWeights:
        """The weights of the decoder."""
        ...

    def of_step(self, pieces: Sequence[RowPiece], padded: int) -> AddedProducts | None:
        """The products to add in a step whose tokens lie in this order; None where no row has an adapter."""
        ...


def open_head(weights: AnyWeights, decoder: DecoderModel) -> AnyHead:
    """The head or drafter of a decoder, by its weights. Raises `Unsupported`."""
    if isinstance(weights, BlockWeights):
        return DraftBlock(weights, decoder)
    if isinstance(weights, AssistantWeights):
        return DraftAssistant(weights, decoder)
    return DraftHead(weights, decoder)


class SlotRunner:
    """`ModelRunner` of a `DecoderModel`. A `head` gets its keys and values in every step, and drafts between steps.

    `packs`: keys and values of all layers but the last are in 8 bits, where groups divide the head dimension.
    """

    batches = rolls_back = True
    uncacheable_reason = ""
    padding_bytes_max = padding_bytes = 0

    def __init__(
        self,
        decoder: DecoderModel,
        context_tokens: int,
        head: AnyHead | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self.decoder = decoder
        self.head = head
        self._context_tokens = context_tokens
        mixing = decoder.mixing
        shapes = packed_shapes(mixing.shapes) if packs else mixing.shapes
        shapes = shapes if head is None else [*shapes, *head.shapes]
        carry = None if head is None else head.carry
        self.slots = Slots(shapes, context_tokens, decoder.ops.storage(), mixing.states, carry)
        self.ends_apart = bool(mixing.states)
        self.blocks = SlotBlocks(self.slots)
        self.launches_ahead = self.slots.storage.writes_in_place
        self._adapters: StepAdapters | None = None

    def adapt(self, adapters: StepAdapters) -> None:
        """Rows may have these adapters from the next step on, and no others."""
        self.decoder.adapt(adapters.weights)
        self._adapters = adapters

    def in_8_bits(self) -> SlotRunner:
        """A runner whose keys and values are in 8 bits."""
        return SlotRunner(self.decoder, self._context_tokens, self.head, packs=True)

    def open(self, tokens: int) -> Slot:
        """See `ModelRunner`."""
        return self.slots.take(tokens)

    def restore(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Slot:
        """See `ModelRunner`."""
        return self.blocks.build(parts, tokens, state, room)

    def forward(
        self,
        pieces: Sequence[RowPiece],
        tokens: mx.array,
        width: int,
        seeing: FeatureSource | None = None,
        queries: Queries | None = None,
    ) -> Outputs:
        """See `ModelRunner`. `queries` gets those of the pieces, where the model has no head."""
        for piece in pieces:
            self._make_room(piece.row, piece.start + piece.count, piece.start)
        ops = self.decoder.ops
        order = sorted(range(len(pieces)), key=lambda index: _order(pieces[index]))
        ordered = [pieces[index] for index in order]
        total = sum(piece.count for piece in pieces)
        padded = ops.padded(total)
        begins = dict(zip(order, _begins(ordered), strict=True))
        layout = self.decoder.mixing.begin([_placed(piece) for piece in ordered], padded)
        chosen = _Wanted(ordered, [begins[index] for index in range(len(pieces))], pieces, width)
        inputs = Inputs(
            self._tokens(pieces, order, tokens, padded),
            ops.array(_positions(ordered, padded)),
            ops.array(chosen.indices),
            deltas=None if self._adapters is None else self._adapters.of_step(ordered, padded),
        )
        if seeing is not None and any(
            piece.row.features and piece.start < piece.row.prefill_tokens for piece in pieces
        ):
            inputs = self._with_images(inputs, ordered, padded, seeing)
        if self.head is None:
            return chosen.outputs(self.decoder, self.decoder.forward(inputs, layout, queries).last)
        return chosen.outputs(self.decoder, self._forward_with(self.head, ordered, inputs, layout))

    def _make_room(self, row: Row, tokens: int, computed: int) -> None:
        """Move a row of so many tokens, of which some are computed, to a larger slot if it needs one."""
        if tokens > row.cache.capacity:
            row.cache = self.slots.move(row.cache, tokens, computed)

    def _tokens(self, pieces: Sequence[RowPiece], order: Sequence[int], tokens: mx.array, padded: int) -> Any:
        """The tokens in the order of the layout, padded."""
        begins = _begins(pieces)
        index = np.concatenate([begins[at] + np.arange(pieces[at].count) for at in order])
        index = np.concatenate([index, np.zeros(padded - len(index), index.dtype)]).astype(np.int32)
        if len(index) == tokens.size and (index == np.arange(len(index))).all():
            return self._own(tokens)
        return self._own(tokens[mx.array(index)])

    def _own(self, array: mx.array) -> Any:
        """An array as the decoder's operations take it."""
        return array if self.decoder.ops.on_mlx else np.asarray(array)

    def _with_images(
        self, inputs: Inputs, pieces: Sequence[RowPiece], padded: int, seeing: FeatureSource
    ) -> Inputs:
        """Inputs with features of images in place of their tokens' embeddings, and their positions."""
        tokens = mx.array(inputs.tokens)
        embeddings = seeing.embed(tokens[None])[0]
        deep = [mx.zeros_like(embeddings) for _ in range(seeing.deep_layers)]
        begin = 0
        for piece in pieces:
            within = slice(begin, begin + piece.count)
            begin += piece.count
            features = seeing.features_of(piece.row, piece.start, piece.count)
            for columns, main, deeper in features:
                index = mx.array(within.start + columns)
                embeddings[index] = main.astype(embeddings.dtype)
                for number, numbers in enumerate(deeper):
                    deep[number][index] = numbers.astype(embeddings.dtype)
        positions = inputs.positions
        if self.decoder.axes is not None and any(piece.row.positions is not None for piece in pieces):
            positions = mx.array(_three_positions(pieces, padded))
        return inputs._replace(
            embeddings=self._own(embeddings), deep=list(map(self._own, deep)), positions=positions
        )

    def cut(self, tokens: int) -> int:
        """All of them."""
        return tokens

    # --- the head ---

    def _forward_with(
        self, head: AnyHead, pieces: Sequence[RowPiece], inputs: Inputs, layout: Any
    ) -> mx.array:
        """Hidden states [wanted, dim] of a step of the ordered pieces, in which the head keeps up with the model."""
        padded = inputs.tokens.shape[0]
        every = inputs._replace(wanted=mx.arange(padded)) if head.takes_all else inputs
        hidden = self.decoder.forward(every, layout)
        states = head.states(hidden)
        if isinstance(head, DraftHead):
            written = self._prime(head, pieces, inputs, states)
        elif isinstance(head, DraftBlock):
            head.keep(list(map(_placed, pieces)), states, mx.array(_positions(pieces, padded)))
            written = self._head_arrays(pieces)
        else:
            written = [_carry(pieces, states)]
        # What the head keeps is computed with the outputs, whichever of them the step waits for.
        last: mx.array = hidden.last[inputs.wanted] if head.takes_all else hidden.last
        (depending,) = mx.depends([last], written)
        return depending  # type: ignore[no-any-return]

    def _prime(
        self, head: DraftHead, pieces: Sequence[RowPiece], inputs: Inputs, hidden: mx.array
    ) -> list[mx.array]:
        """Write the head's keys and values of all tokens but a row's first, and carry the last hidden state of each
        row; returns the arrays to compute. `hidden` states [tokens, dim] and `inputs` are of the ordered pieces."""
        carried = _Carried(hidden)
        pairs: list[RowPiece] = []
        tokens: list[np.ndarray] = []
        before: list[np.ndarray] = []
        for piece, begin in zip(pieces, _begins(pieces), strict=True):
            own, first = begin + np.arange(piece.count), piece.start - 1
            states = own - 1
            place = None if piece.row.cache.carry is None else piece.row.cache.carry.place()
            if piece.start and place is not None:
                states[0] = carried.index(*place)
            else:
                own, states, first = own[1:], states[1:], piece.start
            if len(own):
                pairs.append(RowPiece(piece.row, first, len(own)))
                tokens.append(own)
                before.append(states)
        written = []
        if pairs:
            padded = self.decoder.ops.padded(sum(map(len, tokens)))
            index = mx.array(_padded(np.concatenate(tokens), padded))
            features = None if inputs.embeddings is None else inputs.embeddings[index]
            embeddings = head.embed(inputs.tokens[index], features)
            earlier = carried.source()[mx.array(_padded(np.concatenate(before), padded))]
            placed = [_placed(pair) for pair in pairs]
            attended = head.prime(placed, embeddings, earlier, self._head_positions(pairs, padded))
            written = [attended] if self.launches_ahead else self._head_arrays(pairs)
        return [*written, _carry(pieces, hidden)]

    def draft(self, rows: Sequence[Row], count: int, choose: Choose) -> list[list[int]]:
        """`count` draft tokens of the head for each of `rows`, in decode, whose last known token is not computed.

        `rows` are in the order of `draft_order`.
        """
        assert self.head is not None, "the model has a head"
        if isinstance(self.head, DraftBlock):
            return self._fill(self.head, rows, count, choose)
        return self._advance(self.head, rows, count, choose)

    def _fill(self, head: DraftBlock, rows: Sequence[Row], count: int, choose: Choose) -> list[list[int]]:
        """The first `count` tokens of a block for each row."""
        width = head.width
        pieces = [RowPiece(row, row.computed_tokens, width) for row in rows]
        placed = [replace(_placed(piece), sees_all=True) for piece in pieces]
        padded = self.decoder.ops.padded(len(rows) * width)
        tokens = np.full(padded, head.weights.mask, np.uint32)
        tokens[: len(rows) * width : width] = [row.tokens[-1] for row in rows]
        outputs = head.fill(placed, mx.array(tokens), mx.array(_positions(pieces, padded)))
        of_rows = outputs[: len(rows) * width].reshape(len(rows), width, -1)
        drafted = [
            choose(head.logits(of_rows[:, ahead + 1]), ahead) for ahead in range(min(count, width - 1))
        ]
        mx.eval(drafted, self._head_arrays(pieces))
        made: list[list[int]] = mx.stack(drafted, axis=1).tolist()  # type: ignore[assignment]
        return made

    def _advance(
        self, head: DraftHead | DraftAssistant, rows: Sequence[Row], count: int, choose: Choose
    ) -> list[list[int]]:
        """Tokens of a head that is stepped `count` times."""
        ops = self.decoder.ops
        padded = ops.padded(len(rows))
        carried = _Carried(mx.zeros((1, *head.carry.shape), head.carry.dtype))
        states = [carried.index(*row.cache.carry.place()) for row in rows]
        hidden = carried.source()[mx.array(_padded(np.array(states), padded))]
        spread = mx.array(_padded(np.arange(len(rows)), padded))
        tokens = mx.array([row.tokens[-1] for row in rows], mx.uint32)
        drafted = []
        for ahead in range(count):
            pairs = [RowPiece(row, row.computed_tokens - 1 + ahead * head.moves, 1) for row in rows]
            placed = [_placed(pair) for pair in pairs]
            positions = self._head_positions(pairs, padded) + head.ahead
            hidden, outputs = head.advance(placed, tokens[spread], hidden, positions)
            tokens = choose(head.logits(outputs[: len(rows)]), ahead).astype(mx.uint32)
            drafted.append(tokens)
            # Before the next write, which would copy what this reads: see `engine/kv`.
            mx.eval(tokens, self._head_arrays(pairs))
        made: list[list[int]] = mx.stack(drafted, axis=1).tolist()  # type: ignore[assignment]
        return made

    def draft_order(self, rows: Sequence[Row], count: int) -> list[Row]:
        """`rows` with room for `count` draft tokens each, those of one pool side by side."""
        if isinstance(self.head, DraftBlock):
            count = self.head.width
        for row in rows:
            self._make_room(row, row.computed_tokens + count, row.computed_tokens)
        return sorted(rows, key=lambda row: _order(RowPiece(row, row.computed_tokens, 1)))

    def _head_positions(self, pairs: Sequence[RowPiece], padded: int) -> mx.array:
        """Positions of the hidden states of pairs."""
        assert self.head is not None, "the model has a head"
        if self.head.axes is not None and any(pair.row.positions is not None for pair in pairs):
            return mx.array(_three_positions(pairs, padded))
        return mx.array(_positions(pairs, padded))

    def _head_arrays(self, pairs: Sequence[RowPiece]) -> list[mx.array]:
        """The arrays with the head's keys and values of these rows."""
        assert self.head is not None, "the model has a head"
        pools = {id(pair.row.cache.pool): pair.row.cache.pool for pair in pairs}
        return [
            array
            for pool in pools.values()
            for layer in self.head.layers
            for array in (pool.keys[layer], pool.values[layer])
        ]

    # --- memory ---

    def project_bytes(self, tokens: int) -> int:
        """See `ModelRunner`."""
        return self.slots.project_bytes(tokens + WIDTH_MAX)

    @property
    def byte_count(self) -> int:
        """See `ModelRunner`."""
        return self.slots.byte_count

    def trim(self, empty_bytes_max: int, ahead_bytes: int, waiting: Sequence[int]) -> int:
        """See `ModelRunner`."""
        slots = self.slots
        empty_bytes = slots.unneeded_bytes(waiting)
        if empty_bytes > empty_bytes_max:
            slots.trim(waiting)
            empty_bytes = slots.unneeded_bytes(waiting)
        slots.ahead_bytes = ahead_bytes - empty_bytes
        return empty_bytes

    @property
    def host_bytes(self) -> int:
        """See `ModelRunner`."""
        return 0 if self.slots.storage.on_mlx else self.byte_count + self.slots.empty_bytes

    @property
    def copied_bytes(self) -> int:
        """See `ModelRunner`."""
        states = self.slots.states
        state_bytes = 0 if states is None else states.rows * states.slot_bytes
        return self.slots.largest_array_bytes + self.slots.widened_bytes + state_bytes

    def clear(self) -> None:
        """See `ModelRunner`."""
        self.slots.clear()


def packed_shapes(shapes: Sequence[KVShape]) -> list[KVShape]:
    """Shapes in 8 bits, but that of the last layer, and latents, which are keys and values at once."""
    packed = [
        each._replace(group_size=group_size(each.dim)) if each.has_values else each for each in shapes[:-1]
    ]
    return [*packed, *shapes[-1:]]


class _Wanted:
    """The tokens of a step whose hidden states are used: those that sample, then scored ones, then pooled ones."""

    def __init__(
        self, ordered: Sequence[RowPiece], begins: Sequence[int], pieces: Sequence[RowPiece], width: int
    ) -> None:
        parts: list[np.ndarray] = []
        self._width = width
        self._rows = 0
        self._scored: list[int] = []
        self._pooled: list[int] = []
        for piece, begin in zip(pieces, begins, strict=True):
            if piece.samples:
                first = begin + piece.count - piece.samples
                parts.append(first + np.minimum(np.arange(width), piece.samples - 1))
                self._rows += 1
        for piece, begin in zip(pieces, begins, strict=True):
            first, stop = piece.scored
            if stop > first:
                parts.append(begin + np.arange(first, stop))
                self._scored.append(stop - first)
        for piece, begin in zip(pieces, begins, strict=True):
            if piece.pooled:
                parts.append(begin + np.arange(piece.count))
                self._pooled.append(piece.count)
        # A step without any still has a last layer.
        indices = np.concatenate(parts) if parts else np.zeros(1, np.int64)
        padding = few_sizes(len(indices)) - len(indices)
        self.indices = np.concatenate([indices, np.zeros(padding, indices.dtype)]).astype(np.int32)

    def outputs(self, decoder: DecoderModel, hidden: Any) -> Outputs:
        """Outputs from the hidden states of `indices`."""
        sampled = self._rows * self._width
        logits = None
        if sampled:
            logits = _mlx(decoder.logits(hidden[:sampled])).reshape(self._rows, self._width, -1)
        scored, begin = [], sampled
        for count in self._scored:
            scored.append(_mlx(decoder.logits(hidden[begin : begin + count])))
            begin += count
        pooled = []
        for count in self._pooled:
            pooled.append(_mlx(hidden[begin : begin + count]))
            begin += count
        return Outputs(logits, scored, pooled, _mlx(hidden[:1]))


class _Carried:
    """Hidden states of a step, and behind them those that rows carry from earlier ones."""

    def __init__(self, hidden: mx.array) -> None:
        self._arrays = [hidden]
        self._begins: dict[int, int] = {}
        self._size = hidden.shape[0]

    def index(self, states: mx.array, index: int) -> int:
        """Index in `source` of a state among others."""
        if id(states) not in self._begins:
            self._begins[id(states)] = self._size
            self._arrays.append(states)
            self._size += states.shape[0]
        return self._begins[id(states)] + index

    def source(self) -> mx.array:
        """All states."""
        return self._arrays[0] if len(self._arrays) == 1 else mx.concatenate(self._arrays)


def _carry(pieces: Sequence[RowPiece], hidden: mx.array) -> mx.array:
    """Carry the hidden state of each piece's last token, or of all that may turn out to be it; returns an array of
    these states alone."""
    verifies = any(piece.samples > 1 for piece in pieces)
    counts = [piece.count if piece.samples > 1 else 1 for piece in pieces]
    ends = [begin + piece.count for begin, piece in zip(_begins(pieces), pieces, strict=True)]
    index = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    states = hidden[mx.array(index)]
    for piece, count, end in zip(pieces, counts, np.cumsum(counts), strict=True):
        slot = piece.row.cache
        if verifies and piece.samples == piece.count:
            before = None if slot.carry is None else slot.carry.place()
            slot.carry = Carry(states, int(end) - count, _placed(piece).accepted, before)
        else:
            slot.carry = Carry(states, int(end) - count)
    return states


def _padded(index: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([index, np.zeros(size - len(index), index.dtype)]).astype(np.int32)


def _mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)


def _placed(piece: RowPiece) -> PlacedPiece:
    row, start = piece.row, piece.start
    apart = row.positions is not None and start < row.prefill_tokens
    return PlacedPiece(
        row.cache,
        start,
        piece.count,
        _shift(row, start),
        row,
        verifies=piece.samples > 1,
        positions=_positions_of(piece)[0] if apart else None,
    )


def _order(piece: RowPiece) -> tuple[int, bool, int]:
    """Pieces of one pool are neighbours, the short ones first and by slot."""
    return piece.row.cache.capacity, piece.count > WIDTH_MAX, piece.row.cache.index


def _begins(pieces: Sequence[RowPiece]) -> list[int]:
    """Index of the first token of each piece among those of all."""
    counts = [piece.count for piece in pieces]
    return [int(end) - count for end, count in zip(np.cumsum(counts), counts, strict=True)]


def _positions(pieces: Sequence[RowPiece], padded: int) -> np.ndarray:
    """The position of each token, [tokens]."""
    positions = np.concatenate([_positions_of(piece)[0] for piece in pieces])
    return np.concatenate([positions, np.zeros(padded - len(positions), positions.dtype)]).astype(np.int32)


def _three_positions(pieces: Sequence[RowPiece], padded: int) -> np.ndarray:
    """Three positions of each token, [3, tokens]."""
    positions = np.zeros((3, padded), np.int32)
    for piece, begin in zip(pieces, _begins(pieces), strict=True):
        positions[:, begin : begin + piece.count] = _positions_of(piece)
    return positions


def _positions_of(piece: RowPiece) -> np.ndarray:
    """The positions of the tokens of a piece, [1, tokens] or [3, tokens]."""
    row, end = piece.row, piece.start + piece.count
    positions = np.arange(piece.start, end)[None] + row.shift
    if row.positions is None or piece.start >= row.prefill_tokens:
        return positions
    known = row.positions[:, piece.start : min(end, row.prefill_tokens)]
    behind = np.repeat(positions[:, known.shape[1] :], 3, axis=0)
    return np.concatenate([known, behind], axis=1)


def _shift(row: Row, start: int) -> int:
    """How far the positions of tokens from `start` on are ahead of them, where all of them are behind the prompt."""
    return row.shift if start >= row.prefill_tokens else 0
