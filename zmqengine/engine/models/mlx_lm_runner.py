"""Runs mlx-lm's own code, on mlx-lm's caches: a call for each piece of a prompt, and one for the rows in decode.

A batch is right-justified and padded to its longest row. Rows of very different lengths are in batches of their own, so
that padding stays within a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.block_layout import BlockLayout, Parts, start
from zmqengine.engine.models import mlx_lm_caches as caches_of
from zmqengine.engine.models.mlx_lm_caches import Caches, CacheShape
from zmqengine.engine.models.model_runner import FeatureSource, Outputs, RowPiece
from zmqengine.engine.row import Row

PIECE_TOKENS = 64
"""Unit of pieces of prompts. Many of mlx-lm's models have functions under `mx.compile`, which keeps a trace for each
shape and looks through all of them at each call: 66 us after 2,000 shapes, in place of 4, in every layer
(github.com/ml-explore/mlx/issues/3964). With it pieces of 2,048 tokens have 95 lengths, for at most one piece more in a
prompt."""


class LoneCache:
    """The caches of one row: its own, or its place in a batch. `length`: tokens that they hold."""

    def __init__(self, caches: Caches, length: int) -> None:
        self.own: Caches | None = caches
        self.batch: MergedRows | None = None
        self.length = length

    def alone(self) -> Caches:
        """The row's own caches, or copies of its part of a batch."""
        if self.batch is not None:
            return caches_of.extract(self.batch.caches, self.batch.rows.index(self))
        assert self.own is not None, "a closed cache is not read"
        return self.own

    def park(self) -> None:
        """Leave the batch, with copies of this row's part."""
        if self.batch is not None:
            self.own = self.alone()
            start(caches_of.arrays(self.own))
            self.batch.keep([row for row in self.batch.rows if row is not self])
            self.batch = None

    @property
    def bytes(self) -> int:
        """Bytes of the row's own caches."""
        return 0 if self.own is None else caches_of.byte_count(self.own)

    def close(self, *, is_finite: bool) -> None:
        """Free the caches."""
        if self.batch is not None:
            self.batch.keep([row for row in self.batch.rows if row is not self])
        self.own = self.batch = None


class MergedRows:
    """Rows that are stepped together, and their merged caches."""

    def __init__(self, rows: list[LoneCache]) -> None:
        self.rows = rows
        self.caches = caches_of.merge([row.alone() for row in rows])
        for row in rows:
            row.own, row.batch = None, self

    def join(self, rows: list[LoneCache]) -> None:
        """Add rows."""
        other = MergedRows(rows)
        for ours, theirs in zip(
            caches_of.single_caches(self.caches), caches_of.single_caches(other.caches), strict=True
        ):
            ours.extend(theirs)
        self.rows = self.rows + rows
        for row in rows:
            row.batch = self

    def keep(self, rows: list[LoneCache]) -> None:
        """Drop all other rows."""
        if rows:
            indices = [index for index, row in enumerate(self.rows) if row in rows]
            for cache in caches_of.single_caches(self.caches):
                cache.filter(mx.array(indices))
        else:
            self.caches = []
        self.rows = rows


class MlxLmRunner:
    """`ModelRunner` of a model of mlx-lm. With `batches` its rows are stepped together."""

    launches_ahead = rolls_back = False
    host_bytes = 0
    ends_apart = True

    def __init__(
        self,
        model: Any,
        shape: CacheShape,
        blocks: BlockLayout | None,
        uncacheable_reason: str,
        *,
        batches: bool,
        padding_bytes_max: int = 0,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.uncacheable_reason = uncacheable_reason
        self.batches = batches
        self.padding_bytes_max = padding_bytes_max if batches else 0
        self._shape = shape
        self._batches: list[MergedRows] = []
        self._open: list[LoneCache] = []

    def anew(self) -> MlxLmRunner:
        """A runner of the same model, without rows."""
        runner = copy(self)
        runner.clear()
        return runner

    def open(self, tokens: int) -> LoneCache:
        """See `ModelRunner`."""
        return self._opened(caches_of.new_caches(self.model), 0)

    def restore(
        self, parts: Parts, tokens: int, state: tuple[str, Sequence[mx.array]] | None, room: int
    ) -> LoneCache:
        """See `ModelRunner`."""
        assert self.blocks is not None, "the prefix cache has no blocks"
        return self._opened(self.blocks.build(parts, tokens, state, room), tokens)

    def _opened(self, caches: Caches, length: int) -> LoneCache:
        cache = LoneCache(caches, length)
        self._open = [each for each in self._open if each.own is not None]
        self._open.append(cache)
        return cache

    # --- a step ---

    def forward(
        self, pieces: Sequence[RowPiece], tokens: mx.array, width: int, seeing: FeatureSource | None = None
    ) -> Outputs:
        """See `ModelRunner`."""
        assert width <= 1, "rows of mlx-lm's caches cannot be rolled back"
        logits: dict[int, mx.array] = {}
        scored: list[mx.array] = []
        hidden: list[mx.array] = []
        started: list[mx.array] = []
        begin = 0
        together: list[tuple[int, RowPiece, mx.array]] = []
        for index, piece in enumerate(pieces):
            inputs = tokens[begin : begin + piece.count]
            begin += piece.count
            is_single = piece.count == 1 and piece.samples == 1 and piece.scored == (0, 0)
            if self.batches and is_single and not _has_features(piece):
                together.append((index, piece, inputs))
                continue
            found = self._call(piece, inputs[None], seeing)[0]
            started += caches_of.arrays(piece.row.cache.own)
            if piece.pooled:
                hidden.append(found)
            if piece.scored[1] > piece.scored[0]:
                scored.append(found[piece.scored[0] : piece.scored[1]])
            if piece.samples:
                logits[index] = found[-1:]
        self._batches = [batch for batch in self._batches if batch.rows]
        if together:
            self._arrange([piece.row.cache for _, piece, _ in together])
        members = {id(piece.row.cache): (index, piece, one) for index, piece, one in together}
        for batch in self._batches if together else []:
            ordered = [members[id(cache)] for cache in batch.rows]
            inputs = mx.concatenate([one for _, _, one in ordered])[:, None]
            made = self._step(batch, [piece for _, piece, _ in ordered], inputs)
            for at, (index, _, _) in enumerate(ordered):
                logits[index] = made[at]
        every: mx.array | None = None
        if logits:
            every = mx.stack([logits[index] for index in sorted(logits)])
            if len(self._batches) == 1 and len(logits) == len(together):
                order = [self._batches[0].rows.index(piece.row.cache) for _, piece, _ in together]
                # In order already, in most steps.
                every = made if order == sorted(order) else made[mx.array(order)]
        if started:
            # One number of the last array, which pins no memory.
            last = started[-1]
            return Outputs(every, scored, hidden, last[(slice(1),) * last.ndim] + 0, started)
        assert every is not None, "a step has pieces"
        return Outputs(every, scored, hidden, every[:1, :, :1])

    def _call(self, piece: RowPiece, inputs: mx.array, seeing: FeatureSource | None) -> mx.array:
        """Logits or hidden states [1, tokens, ...] of a piece with caches of its own."""
        cache: LoneCache = piece.row.cache
        cache.park()
        assert cache.own is not None
        caches_of.drop_slack(cache.own, piece.count)
        options: dict[str, Any] = {}
        if _has_features(piece) and seeing is not None:
            if (embeddings := self._features(piece, inputs, seeing)) is not None:
                options["input_embeddings"] = embeddings
            if (places := _positions(piece)) is not None:
                options["positions"] = places
        elif (ahead := _shift([piece.row])) is not None:
            options["shift"] = ahead
        run = trunk_of(self.model) if piece.pooled else self.model
        found: mx.array = run(inputs, cache=cache.own, **options)
        caches_of.trim_to_windows(cache.own)
        cache.length += piece.count
        return found

    def _features(self, piece: RowPiece, inputs: mx.array, seeing: FeatureSource) -> mx.array | None:
        features = seeing.features_of(piece.row, piece.start, piece.count)
        if not features:
            return None
        embeddings = seeing.embed(inputs)
        for columns, main, _ in features:
            embeddings[0, mx.array(columns)] = main.astype(embeddings.dtype)
        return embeddings

    def _step(self, batch: MergedRows, pieces: Sequence[RowPiece], inputs: mx.array) -> mx.array:
        """Logits [rows, 1, vocab] of a step of a batch."""
        options: dict[str, Any] = {}
        if (ahead := _shift([piece.row for piece in pieces])) is not None:
            options["shift"] = ahead
        made: mx.array = self.model(inputs, cache=batch.caches, **options)
        for cache in batch.rows:
            cache.length += 1
        return made

    def _arrange(self, caches: Sequence[LoneCache]) -> None:
        """Put these caches, and no others, into batches whose padding stays within the bound."""
        wanted = {id(cache) for cache in caches}
        for batch in self._batches:
            for cache in [row for row in batch.rows if id(row) not in wanted]:
                cache.park()
        self._batches = [batch for batch in self._batches if batch.rows]
        joining = sorted((cache for cache in caches if cache.batch is None), key=lambda cache: cache.length)
        for cache in joining:
            for batch in self._batches:
                if self._padding([*batch.rows, cache]) <= self._padding(batch.rows) + self._room():
                    batch.join([cache])
                    break
            else:
                self._batches.append(MergedRows([cache]))

    def _room(self) -> int:
        return self.padding_bytes_max - self.padding_bytes

    def _padding(self, rows: Sequence[LoneCache]) -> int:
        """Bytes that rows take more in one batch than apart."""
        longest = self._shape.project(max(row.length for row in rows))
        return sum(longest - self._shape.project(row.length) for row in rows)

    def cut(self, tokens: int) -> int:
        """A multiple of `PIECE_TOKENS`, or what is left of a prompt."""
        return tokens // PIECE_TOKENS * PIECE_TOKENS or tokens

    # --- memory ---

    def project_bytes(self, tokens: int) -> int:
        """See `ModelRunner`."""
        return self._shape.project(tokens)

    @property
    def byte_count(self) -> int:
        """See `ModelRunner`."""
        alone = sum(cache.bytes for cache in self._open)
        return alone + sum(caches_of.byte_count(batch.caches) for batch in self._batches)

    def trim(self, empty_bytes_max: int, ahead_bytes: int, waiting: Sequence[int]) -> int:
        """See `ModelRunner`. Nothing is allocated ahead; batches are copied as they grow."""
        return self.copied_bytes

    @property
    def padding_bytes(self) -> int:
        """See `ModelRunner`."""
        return sum(self._padding(batch.rows) for batch in self._batches if batch.rows)

    @property
    def copied_bytes(self) -> int:
        """See `ModelRunner`."""
        sizes = [caches_of.byte_count(batch.caches) for batch in self._batches]
        return max(sizes, default=0) + max((cache.bytes for cache in self._open), default=0)

    def clear(self) -> None:
        """See `ModelRunner`."""
        self._batches, self._open = [], []


def trunk_of(model: Any) -> Any:
    """The part of a language model that ends with its last norm, before the product that makes logits.

    Raises `AttributeError` for a model that has none under the usual names.
    """
    owner = getattr(model, "language_model", model)
    for name in ("model", "transformer", "backbone"):
        trunk = getattr(owner, name, None)
        if callable(trunk):
            return trunk
    raise AttributeError("no layers apart from the logits")


def _has_features(piece: RowPiece) -> bool:
    return bool(piece.row.features) and piece.start < piece.row.prefill_tokens


def _positions(piece: RowPiece) -> mx.array | None:
    """Three positions [3, 1, tokens] of a piece of a prompt, if its row has such."""
    known = piece.row.positions
    if known is None:
        return None
    return mx.array(known[:, None, piece.start : piece.start + piece.count])


def _shift(rows: Sequence[Row]) -> mx.array | None:
    """How far the positions of rows behind their prompts are ahead of the tokens, [rows]; None if none are."""
    return mx.array([row.shift for row in rows], mx.int32) if any(row.shift for row in rows) else None
