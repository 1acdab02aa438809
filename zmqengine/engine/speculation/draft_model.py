"""Drafts of a smaller model with the same vocabulary, stepped for all rows at once."""

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
# Tokens of prompts that are prefilled before one verify block, which waits for them.
_PREFILL_TOKENS_MAX = 512
# Weight of the last draft in the moving average of the time of a draft token.
_TIME_WEIGHT = 0.1
_WARM_UP_PROMPT = [1, 2, 3]


class _Prefill:
    """The tokens of a row, prefilled into caches of its own in chunks. The last chunk is left to the first draft."""

    def __init__(self, row: Row, model: Any) -> None:
        self.row = row
        self.caches = kv.new_caches(model)
        self.held = 0

    @property
    def is_done(self) -> bool:
        return self.held > 0 and len(self.row.tokens) - 1 - self.held < _PREFILL_TOKENS_MAX

    def advance(self, model: Any, vocab_size: int, tokens_max: int) -> int:
        """Prefill at most `tokens_max` more tokens; returns their number."""
        chunk = self.row.tokens[self.held : min(self.held + tokens_max, len(self.row.tokens) - 1)]
        if chunk:
            kv.read_alone(model, self.caches, [min(token, vocab_size - 1) for token in chunk])
            # Waited for, so that its time counts as the time of drafting.
            mx.eval(kv.arrays(self.caches))
        self.held += len(chunk)
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
        # Both models may have rows of weights for more tokens than their tokenizer, and unlike numbers of them.
        self._vocab_size = words
        self._model = model
        self._kernels = kernels
        self._rows: list[Row] = []
        self._held: list[int] = []
        self._kv = kv.KVBatch()
        # Draft tokens in the caches, [rows][tokens], of which nobody has said yet whether they are accepted.
        self._unverified: list[list[int]] = []
        self._prefill: _Prefill | None = None
        self._draw_tokens = draw
        self._plan: DrawPlan | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the draft model's KV caches."""
        prefill = [] if self._prefill is None else self._prefill.caches
        return self._kv.byte_count + kv.byte_count(prefill)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the draft model's batch."""
        longest = self.shape.project(max(self._held, default=0))
        return sum(longest - self.shape.project(held) for held in self._held)

    def project_bytes(self, tokens: int) -> int:
        """The most bytes of its caches for a row of `tokens`."""
        return self.shape.project(tokens + DRAFT_TOKENS_MAX)

    def prepare(self, rows_max: int) -> None:
        """Draft for rows that nobody asked for: the time to compile kernels is no time of a draft."""
        for count in sorted({1, rows_max}):
            rows = [Row(RowRequest(row, _WARM_UP_PROMPT, 99), self._vocab_size, 128) for row in range(count)]
            for _ in range(2):
                self.token_s = 0.0
                self.draft(rows, [DRAFT_TOKENS_MAX - 1] * count)
            self.clear()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """A draft for each row that is prefilled; some more tokens of the other rows are prefilled."""
        self._roll_back()
        self.release()
        while self._rows and 2 * self.padding_bytes > self.padding_bytes_max:
            # The longest row goes without, or all others are padded to it.
            self._drop([self._rows[self._held.index(max(self._held))]])
        self._advance_prefill([row for row in rows if row not in self._rows])
        if not self._rows or not max(counts, default=0):
            return [[] for _ in rows]
        started_s = time.perf_counter()
        count = max(counts)
        drafts, is_ready = self._draft(count)
        token_s = (time.perf_counter() - started_s) / count
        self.token_s += _TIME_WEIGHT * (token_s - self.token_s) if self.token_s else token_s
        places = {row: place for place, row in enumerate(self._rows)}
        found: list[Sequence[int]] = []
        for row, most in zip(rows, counts, strict=True):
            place = places.get(row)
            found.append([] if place is None or not is_ready[place] else drafts[place][:most])
        return found

    def release(self) -> None:
        """Give back the caches of rows that are gone."""
        if self._prefill is not None and self._prefill.row.gone:
            self._prefill = None
        gone = [row for row in self._rows if row.gone]
        if gone:
            self._roll_back()
            self._drop(gone)

    def clear(self) -> None:
        """Give back all caches."""
        self._rows, self._held, self._kv, self._unverified, self._prefill = [], [], kv.KVBatch(), [], None

    def _draft(self, count: int) -> tuple[list[list[int]], list[bool]]:
        """`count` draft tokens of every row, and which rows they are good for: those whose tokens are all read."""
        # A row that has no new token since the last draft has its last one read again.
        again = [max(0, held + 1 - len(row.tokens)) for row, held in zip(self._rows, self._held, strict=True)]
        if any(again):
            self._held = [held - count for held, count in zip(self._held, again, strict=True)]
            self._kv.roll_back(again)
        unread = [row.tokens[held:] for row, held in zip(self._rows, self._held, strict=True)]
        width = min(max(map(len, unread)), _PREFILL_TOKENS_MAX)
        inputs = np.zeros((len(unread), width), np.uint32)
        taken = [min(len(ids), width) for ids in unread]
        for place, ids in enumerate(unread):
            inputs[place, : taken[place]] = np.minimum(ids[:width], self._vocab_size - 1)
        tokens = mx.array(inputs)
        logits = self._model(tokens, cache=self._kv.begin_step(tokens))
        last = mx.array([max(0, read - 1) for read in taken])[:, None, None]
        tokens = self._sample(mx.take_along_axis(logits, last, axis=1)[:, 0], 0)
        self._held = [held + read for held, read in zip(self._held, taken, strict=True)]
        self._kv.roll_back([width - read for read in taken])
        made = [tokens]
        # No step is started before the last one is built, so these layers must not write in place (theory in `kv`).
        for ahead in range(1, count):
            inputs_ahead = tokens[:, None]
            logits = self._model(inputs_ahead, cache=self._kv.begin_step(inputs_ahead))
            tokens = self._sample(logits[:, -1], ahead)
            made.append(tokens)
        drafts: list[list[int]] = mx.stack(made, axis=1).tolist()  # type: ignore[assignment]
        self._unverified = [drafted[: count - 1] for drafted in drafts]
        return drafts, [held == len(row.tokens) for held, row in zip(self._held, self._rows, strict=True)]

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
            _alike(drafted, row.tokens[held : held + len(drafted)])
            for row, held, drafted in zip(self._rows, self._held, self._unverified, strict=True)
        ]
        self._held = [held + count for held, count in zip(self._held, right, strict=True)]
        self._kv.roll_back([len(self._unverified[0]) - count for count in right])
        self._unverified = []

    def _drop(self, leaving: Sequence[Row]) -> None:
        if not leaving:
            return
        gone = {id(row) for row in leaving}
        places = [place for place, row in enumerate(self._rows) if id(row) not in gone]
        places = self._kv.keep_rows(places)
        self._rows = [self._rows[place] for place in places]
        self._held = [self._held[place] for place in places]
        self._follow_change()

    def _advance_prefill(self, waiting: Sequence[Row]) -> None:
        """Prefill some tokens of waiting rows, the shortest first; a row joins the batch when it is through."""
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
                self._kv.join(kv.KVBatch.merge([prefill.caches], [prefill.held], self._kernels))
                self._rows.append(prefill.row)
                self._held.append(prefill.held)
                self._follow_change()

    def _has_room(self, row: Row) -> bool:
        """Whether the batch with this row stays within its bound of padding."""
        lengths = [*self._held, len(row.tokens)]
        padding = max(lengths) * len(lengths) - sum(lengths)
        return len(row.tokens) > 1 and 2 * padding * self.shape.token_bytes <= self.padding_bytes_max

    def _follow_change(self) -> None:
        self._plan = self._draw_tokens.plan(self._rows, self._vocab_size)


def _alike(drafted: Sequence[int], coming: Sequence[int]) -> int:
    """The number of draft tokens that equal the tokens that came, up to the first that differs."""
    pairs = zip(drafted, coming, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(coming)))
