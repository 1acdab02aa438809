"""Sorts the rows in decode into batches of about the same length.

Every row of a batch takes as much memory, and as much bandwidth in each step, as its longest row. So a row of 30,000
tokens gets a batch of its own when padding the others to its length would cost more than a second model call. Rows of a
batch grow alike, so padding does not grow after a row has joined, unless drafts are accepted; rows draft only while
there is room for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from zmqengine.engine.interface import StepResult
from zmqengine.engine.kv import KVBatch
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.row import Caches, Row, SampledToken
from zmqengine.engine.step.decode import DecodeBatch
from zmqengine.engine.step.packed import forward
from zmqengine.engine.step.padding import longest, padding_bytes

# Share of the remaining room that a row's padding may take. If the first rows took all of it, each of the later ones
# would get a batch of its own: 64 chats on a GPU had up to 12 batches.
_ROOM_SHARE = 1 / 4
# Share of the room for a row that is longer than the batch, and pads all its rows. With a quarter, 32 chats had two
# batches in 87 % of the steps, where there is room for one.
_LONGER_SHARE = 1 / 2


class LengthBuckets:
    """The rows in decode, in batches whose padding is at most `padding_bytes_max` in all.

    `new_batch` makes a batch; `project_bytes` gives the bytes of a row's caches by its tokens. A step makes at most
    `step_tokens_max` tokens for a row.
    """

    def __init__(
        self,
        new_batch: Callable[[], DecodeBatch],
        project_bytes: Callable[[int], int],
        padding_bytes_max: int,
        step_tokens_max: int = 1,
    ) -> None:
        self._new_batch = new_batch
        self._project_bytes = project_bytes
        self._padding_bytes_max = padding_bytes_max
        self._step_tokens_max = step_tokens_max
        self._batches: list[DecodeBatch] = []
        self.is_stepping = False
        """Whether the last step launched a decode step, and did not only report the tokens of the one before."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def rows(self) -> int:
        """Number of rows in decode."""
        return sum([len(batch.rows) for batch in self._batches])

    @property
    def byte_count(self) -> int:
        """Bytes of all batches' caches."""
        return sum(batch.kv.byte_count for batch in self._batches)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in all batches."""
        return sum(self._padding_bytes(batch.rows) for batch in self._batches)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest batch's caches."""
        return max((batch.kv.byte_count for batch in self._batches), default=0)

    @property
    def empty_bytes(self) -> int:
        """Bytes of allocated rows that no request uses."""
        return sum(batch.kv.empty_bytes for batch in self._batches)

    @property
    def padding_room_bytes(self) -> int:
        """Bytes that padding may still take."""
        return max(0, self._padding_bytes_max - self.padding_bytes)

    def join(self, groups: Sequence[tuple[Sequence[Row], KVBatch]]) -> None:
        """Add groups of rows, each to the batch where it costs the least padding, or to a new one.

        The padding inside each group must fit `padding_room_bytes`.
        """
        own = [self._padding_bytes(rows) for rows, _ in groups]
        for index, (rows, caches) in enumerate(groups):
            # The padding inside the groups to come must still fit.
            self._join(rows, caches, self.padding_room_bytes - sum(own[index + 1 :]))

    def _join(self, rows: Sequence[Row], caches: KVBatch, room_bytes: int) -> None:
        costs = [
            self._padding_bytes([*batch.rows, *rows]) - self._padding_bytes(batch.rows)
            for batch in self._batches
        ]
        if costs:
            batch = self._batches[costs.index(min(costs))]
            share = _LONGER_SHARE if longest(rows) > longest(batch.rows) else _ROOM_SHARE
        if not costs or min(costs) > room_bytes * share * len(rows):
            batch = self._new_batch()
            self._batches.append(batch)
        batch.join(rows, caches)

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; unknown ones are ignored."""
        for batch in self._batches:
            batch.leave(rows)

    def drop(self, rows: Sequence[Row]) -> None:
        """Drop rows without offering their caches; unknown ones are ignored."""
        for batch in self._batches:
            batch.drop(set(rows))

    def take_out(self, row: Row) -> tuple[Caches, SampledToken | None] | None:
        """Drop a row that is here; see `DecodeBatch.take_out`."""
        return next(batch for batch in self._batches if row in batch.rows).take_out(row)

    def step(self, result: StepResult, model: Any, chunk: Sequence[Segment] = ()) -> list[mx.array]:
        """Launch the next step of every batch and a `chunk` of prompts, in one packed step of `model`.

        Reports the tokens of the steps before to `result`. Returns the logits of the segments of `chunk`, not computed.
        """
        stepping: list[DecodeBatch] = []
        segments: list[Segment] = []
        for batch in self._batches:
            segment = batch.begin(result, partial(self._may_speculate, batch))
            if segment is not None:
                stepping.append(batch)
                segments.append(segment)
        self.is_stepping = bool(stepping)
        logits = forward(model, [*segments, *chunk])
        for batch, own in zip(stepping, logits, strict=False):
            batch.complete(own, result, beside_prompts=bool(chunk))
        for batch in [*self._batches]:
            if batch.idle:
                batch.kv.free_replaced()
                self._batches.remove(batch)
        return logits[len(segments) :]

    def _may_speculate(self, batch: DecodeBatch) -> bool:
        """Whether drafts keep the padding within its bound, and their cost is known."""
        # A step of one of several batches waits for the others, so it takes longer than was measured.
        if len(self._batches) > 1:
            return False
        # One row may gain all tokens of a verify block, and the others are padded to its length. Another block may be
        # in flight.
        grown = self._project_bytes(2 * self._step_tokens_max) - self._project_bytes(0)
        return (len(batch.rows) - 1) * grown <= self.padding_room_bytes

    def _padding_bytes(self, rows: Sequence[Row]) -> int:
        return padding_bytes(rows, self._project_bytes)
