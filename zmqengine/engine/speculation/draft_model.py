"""The draft model: a smaller model with the same vocabulary, stepped for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw, DrawPlan

DRAFT_TOKENS_MAX = 8
"""Columns of its KV cache beyond a row: the widest verify block."""
# Maximum tokens of prompts that the draft model prefills before one verify block, which waits for them.
_PREFILL_TOKENS_MAX = 512
# Weight of the last draft in the moving average of the time of a draft token.
_TIME_WEIGHT = 0.1
_WARM_UP_PROMPT = [1, 2, 3]


class _Prefill:
    """The tokens of a row, prefilled into caches of its own in chunks. The last chunk is left to the first draft."""

    def __init__(self, row: Row, model: Any) -> None:
        self.row = row
        self.caches = kv.new_caches(model)
        self.computed_tokens = 0

    @property
    def is_done(self) -> bool:
        return (
            self.computed_tokens > 0 and len(self.row.tokens) - 1 - self.computed_tokens < _PREFILL_TOKENS_MAX
        )

    def advance(self, model: Any, vocab_size: int, tokens_max: int) -> int:
        """Prefill at most `tokens_max` more tokens; returns the number of them."""
        chunk = self.row.tokens[
            self.computed_tokens : min(self.computed_tokens + tokens_max, len(self.row.tokens) - 1)
        ]
        if chunk:
            kv.prefill_row(model, self.caches, [min(token, vocab_size - 1) for token in chunk])
            # Evaluated here, so that its time counts as time of drafting.
            mx.eval(kv.arrays(self.caches))
        self.computed_tokens += len(chunk)
        return max(1, len(chunk))


class DraftModel:
    """Drafts of a smaller model with the target's vocabulary, stepped for all its rows at once.

    A row samples its draft tokens with the random numbers of its own tokens, so that they agree more often. The draft
    model has caches of its own: it prefills the prompt of a row that joins, and rolls back the rejected tokens.
    """

    name = "draft"
    prior = 0.6

    def __init__(
        self,
        model: Any,
        parameter_bytes: int,
        shape: kv.CacheShape,
        *,
        words: int,
        padding_bytes_max: int,
        kernels: kv.KVKernels = kv.PLAIN,
        draw: Draw = PLAIN_DRAW,
    ) -> None:
        self.parameter_bytes = parameter_bytes
        self.shape = shape
        self.padding_bytes_max = padding_bytes_max
        self.token_s = 0.0
        # Both models may have logits for more tokens than their tokenizer, and unlike numbers of them.
        self._vocab_size = words
        self._model = model
        self._kernels = kernels
        self._rows: list[Row] = []
        self._lengths: list[int] = []
        self._kv = kv.KVBatch()
        # Draft tokens in the caches, [rows][tokens], that are not verified yet.
        self._unverified: list[list[int]] = []
        self._prefill: _Prefill | None = None
        self._draw_tokens = draw
        self._plan: DrawPlan | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of the draft model's KV caches."""
        prefill = [] if self._prefill is None else self._prefill.caches
        return self._kv.byte_count + kv.byte_count(prefill)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the draft model's batch."""
        longest = self.shape.project(max(self._lengths, default=0))
        return sum(longest - self.shape.project(length) for length in self._lengths)

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of its caches for a row of `tokens`."""
        return self.shape.project(tokens + DRAFT_TOKENS_MAX)

    def prepare(self, rows_max: int) -> None:
        """Warm up by drafts for made-up rows, so that compiled kernels do not count as time of drafting."""
        for count in sorted({1, rows_max}):
            rows = [Row(RowRequest(row, _WARM_UP_PROMPT, 99), self._vocab_size, 128) for row in range(count)]
            for _ in range(2):
                self.token_s = 0.0
                self.draft(rows, [DRAFT_TOKENS_MAX - 1] * count)
            self.clear()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """A draft for each row in the batch; prefills some tokens of the other rows."""
        self._roll_back()
        self.release()
        while self._rows and 2 * self.padding_bytes > self.padding_bytes_max:
            # The longest row gets no drafts, or all others would be padded to it.
            self._drop([self._rows[self._lengths.index(max(self._lengths))]])
        self._advance_prefill([row for row in rows if row not in self._rows])
        if not self._rows or not max(counts, default=0):
            return [[] for _ in rows]
        started_s = time.perf_counter()
        count = max(counts)
        drafts, is_ready = self._draft(count)
        token_s = (time.perf_counter() - started_s) / count
        self.token_s += _TIME_WEIGHT * (token_s - self.token_s) if self.token_s else token_s
        indices = {row: index for index, row in enumerate(self._rows)}
        found: list[Sequence[int]] = []
        for row, most in zip(rows, counts, strict=True):
            index = indices.get(row)
            found.append([] if index is None or not is_ready[index] else drafts[index][:most])
        return found

    def release(self) -> None:
        """Free the caches of rows that are gone."""
        if self._prefill is not None and self._prefill.row.gone:
            self._prefill = None
        gone = [row for row in self._rows if row.gone]
        if gone:
            self._roll_back()
            self._drop(gone)

    def clear(self) -> None:
        """Free all caches."""
        self._rows, self._lengths, self._kv, self._unverified, self._prefill = [], [], kv.KVBatch(), [], None

    def _draft(self, count: int) -> tuple[list[list[int]], list[bool]]:
        """`count` draft tokens of every row, and whether each row's are valid: whether all of its tokens were read."""
        # A row without a new token since the last draft reads its last token again.
        again = [
            max(0, length + 1 - len(row.tokens))
            for row, length in zip(self._rows, self._lengths, strict=True)
        ]
        if any(again):
            self._lengths = [length - count for length, count in zip(self._lengths, again, strict=True)]
            self._kv.roll_back(again)
        unread = [row.tokens[length:] for row, length in zip(self._rows, self._lengths, strict=True)]
        width = min(max(map(len, unread)), _PREFILL_TOKENS_MAX)
        inputs = np.zeros((len(unread), width), np.uint32)
        taken = [min(len(ids), width) for ids in unread]
        for index, ids in enumerate(unread):
            inputs[index, : taken[index]] = np.minimum(ids[:width], self._vocab_size - 1)
        tokens = mx.array(inputs)
        logits = self._model(tokens, cache=self._kv.begin_step(tokens))
        last = mx.array([max(0, read - 1) for read in taken])[:, None, None]
        tokens = self._sample(mx.take_along_axis(logits, last, axis=1)[:, 0], 0)
        self._lengths = [length + read for length, read in zip(self._lengths, taken, strict=True)]
        self._kv.roll_back([width - read for read in taken])
        made = [tokens]
        # All steps are built before the first is started, so these layers must not write in place (theory in `kv`).
        for ahead in range(1, count):
            inputs_ahead = tokens[:, None]
            logits = self._model(inputs_ahead, cache=self._kv.begin_step(inputs_ahead))
            tokens = self._sample(logits[:, -1], ahead)
            made.append(tokens)
        drafts: list[list[int]] = mx.stack(made, axis=1).tolist()  # type: ignore[assignment]
        self._unverified = [drafted[: count - 1] for drafted in drafts]
        return drafts, [
            length == len(row.tokens) for length, row in zip(self._lengths, self._rows, strict=True)
        ]

    def _sample(self, logits: mx.array, ahead: int) -> mx.array:
        logits = logits[:, : self._vocab_size]
        assert self._plan is not None, "rows have a plan"
        return self._plan.draw(logits, ahead=ahead)[0].astype(mx.uint32)

    def _roll_back(self) -> None:
        """Keep the accepted draft tokens in the caches; roll back the others."""
        if not self._unverified or not self._unverified[0]:
            self._unverified = []
            return
        right = [
            _alike(drafted, row.tokens[length : length + len(drafted)])
            for row, length, drafted in zip(self._rows, self._lengths, self._unverified, strict=True)
        ]
        self._lengths = [length + count for length, count in zip(self._lengths, right, strict=True)]
        self._kv.roll_back([len(self._unverified[0]) - count for count in right])
        self._unverified = []

    def _drop(self, leaving: Sequence[Row]) -> None:
        if not leaving:
            return
        gone = {id(row) for row in leaving}
        indices = [index for index, row in enumerate(self._rows) if id(row) not in gone]
        indices = self._kv.keep_rows(indices)
        self._rows = [self._rows[index] for index in indices]
        self._lengths = [self._lengths[index] for index in indices]
        self._follow_change()

    def _advance_prefill(self, waiting: Sequence[Row]) -> None:
        """Prefill some tokens of waiting rows, the shortest first; a row joins the batch when its prefill is
        complete."""
        left = _PREFILL_TOKENS_MAX
        while left > 0:
            if self._prefill is None:
                found = [row for row in waiting if row not in self._rows and self._has_room(row)]
                if not found:
                    break
                self._prefill = _Prefill(min(found, key=lambda row: len(row.tokens)), self._model)
            prefill = self._prefill
            left -= prefill.advance(self._model, self._vocab_size, left)
            if prefill.is_done:
                self._prefill = None
                self._kv.join(kv.KVBatch.merge([prefill.caches], [prefill.computed_tokens], self._kernels))
                self._rows.append(prefill.row)
                self._lengths.append(prefill.computed_tokens)
                self._follow_change()

    def _has_room(self, row: Row) -> bool:
        """Whether the batch with this row stays within the bound on padding."""
        lengths = [*self._lengths, len(row.tokens)]
        padding = max(lengths) * len(lengths) - sum(lengths)
        return len(row.tokens) > 1 and 2 * padding * self.shape.token_bytes <= self.padding_bytes_max

    def _follow_change(self) -> None:
        self._plan = self._draw_tokens.plan(self._rows, self._vocab_size)


def _alike(drafted: Sequence[int], coming: Sequence[int]) -> int:
    """Length of the common prefix of draft tokens and sampled tokens."""
    pairs = zip(drafted, coming, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(coming)))
