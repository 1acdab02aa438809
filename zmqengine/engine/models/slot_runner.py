"""Runs our own decoder: every piece of a step in one forward pass, over slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv.block_layout import Parts, SlotBlocks
from zmqengine.engine.kv.slots import Slot, Slots
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.attention import WIDTH_MAX, PlacedPiece
from zmqengine.engine.models.decoder import DecoderModel, Inputs
from zmqengine.engine.models.few_sizes import few_sizes
from zmqengine.engine.models.model_runner import FeatureSource, Outputs, RowPiece
from zmqengine.engine.models.ops import AddedProducts
from zmqengine.engine.row import Row


class StepAdapters(Protocol):
    """The adapters of a decoder. `weights` are its own with their factors."""

    weights: DecoderWeights

    def of_step(self, pieces: Sequence[RowPiece], padded: int) -> AddedProducts | None:
        """The products to add in a step whose tokens lie in this order; None where no row has an adapter."""
        ...


class SlotRunner:
    """`ModelRunner` of a `DecoderModel`."""

    batches = rolls_back = True
    uncacheable_reason = ""
    padding_bytes_max = padding_bytes = 0

    def __init__(self, decoder: DecoderModel, context_tokens: int) -> None:
        self.decoder = decoder
        self._context_tokens = context_tokens
        mixing = decoder.mixing
        self.slots = Slots(mixing.shapes, context_tokens, decoder.ops.storage(), mixing.states)
        self.ends_apart = bool(mixing.states)
        self.blocks = SlotBlocks(self.slots)
        self.launches_ahead = self.slots.storage.writes_in_place
        self.adapters: StepAdapters | None = None

    def adapted(self, adapters: StepAdapters) -> SlotRunner:
        """A runner whose rows may have these adapters."""
        decoder = self.decoder
        runner = SlotRunner(
            DecoderModel(adapters.weights, decoder.ops, replays=decoder.replays), self._context_tokens
        )
        runner.adapters = adapters
        return runner

    def open(self, tokens: int) -> Slot:
        """See `ModelRunner`."""
        return self.slots.take(tokens)

    def restore(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> Slot:
        """See `ModelRunner`."""
        return self.blocks.build(parts, tokens, state, room)

    def forward(
        self, pieces: Sequence[RowPiece], tokens: mx.array, width: int, seeing: FeatureSource | None = None
    ) -> Outputs:
        """See `ModelRunner`."""
        for piece in pieces:
            row = piece.row
            if piece.start + piece.count > row.cache.capacity:
                row.cache = self.slots.move(row.cache, piece.start + piece.count, piece.start)
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
            deltas=None if self.adapters is None else self.adapters.of_step(ordered, padded),
        )
        if seeing is not None and any(
            piece.row.features and piece.start < piece.row.prefill_tokens for piece in pieces
        ):
            inputs = self._with_images(inputs, ordered, padded, seeing)
        return chosen.outputs(self.decoder, self.decoder.forward(inputs, layout))

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
        return self.slots.largest_array_bytes + state_bytes

    def clear(self) -> None:
        """See `ModelRunner`."""
        self.slots.clear()


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


def _mlx(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)


def _placed(piece: RowPiece) -> PlacedPiece:
    row, start = piece.row, piece.start
    return PlacedPiece(row.cache, start, piece.count, _shift(row, start), row, verifies=piece.samples > 1)


def _order(piece: RowPiece) -> tuple[int, bool, int]:
    """Pieces of one pool are neighbours, the short ones first and by slot."""
    return piece.row.cache.capacity, piece.count > WIDTH_MAX, piece.row.cache.index


def _begins(pieces: Sequence[RowPiece]) -> list[int]:
    """Index of the first token of each piece among those of all."""
    counts = [piece.count for piece in pieces]
    return [int(end) - count for end, count in zip(np.cumsum(counts), counts, strict=True)]


def _positions(pieces: Sequence[RowPiece], padded: int) -> np.ndarray:
    """The position of each token, [tokens]."""
    known = [piece.start + _shift(piece.row, piece.start) + np.arange(piece.count) for piece in pieces]
    positions = np.concatenate(known)
    return np.concatenate([positions, np.zeros(padded - len(positions), positions.dtype)]).astype(np.int32)


def _three_positions(pieces: Sequence[RowPiece], padded: int) -> np.ndarray:
    """Three positions of each token, [3, tokens]."""
    positions = np.zeros((3, padded), np.int32)
    begin = 0
    for piece in pieces:
        row, end = piece.row, piece.start + piece.count
        within = slice(begin, begin + piece.count)
        begin += piece.count
        positions[:, within] = piece.start + row.shift + np.arange(piece.count)
        if row.positions is not None and piece.start < row.prefill_tokens:
            known = row.positions[:, piece.start : min(end, row.prefill_tokens)]
            positions[:, within.start : within.start + known.shape[1]] = known
    return positions


def _shift(row: Row, start: int) -> int:
    """How far the positions of tokens from `start` on are ahead of them, where all of them are behind the prompt."""
    return row.shift if start >= row.prefill_tokens else 0
