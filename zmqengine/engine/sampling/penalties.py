"""Logit bias and penalties, kept as arrays for just the rows that use them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.row import Row
from zmqengine.sampling_params import Sampling

PENALISED = Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={1: 1.0})
"""All of them at once, to be tried before a request asks for them."""


def uses_penalties(sampling: Sampling) -> bool:
    """Whether a row's logits are changed before sampling."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Penalties:
    """The changed logits of some rows of a batch.

    `index` says where in the batch the rows stand. First the bias is added. Then the repetition penalty divides
    positive and multiplies negative logits of tokens in prompt or output (Keskar et al., arXiv:1909.05858). Then
    the frequency penalty times its count in the output, and the presence penalty if it is in the output, are
    subtracted from each token's logit (the OpenAI API's definition).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[Row] = []
        self.index: mx.array | None = None

    def set_rows(self, batch: Sequence[Row]) -> None:
        """Follow a change of the batch: rows that stay keep their state, others get theirs from their tokens."""
        known = {id(row): place for place, row in enumerate(self.rows)}
        places = [place for place, row in enumerate(batch) if uses_penalties(row.sampling)]
        # Those that are new come last here, wherever they stand in the batch.
        places.sort(key=lambda place: id(batch[place]) not in known)
        rows = [batch[place] for place in places]
        self.index = mx.array(places) if places else None
        if rows == self.rows:
            return
        kept = [known[id(row)] for row in rows if id(row) in known]
        fresh = [row for row in rows if id(row) not in known]
        self._counts = self._joined("_counts", kept, [self._count_outputs(row) for row in fresh])
        self._read = self._joined("_read", kept, [self._mark_read(row) for row in fresh])
        self._bias = self._joined("_bias", kept, [self._spread_bias(row) for row in fresh])
        self.rows = rows
        self._repetition = _column([row.sampling.repetition_penalty for row in rows])
        self._presence = _column([row.sampling.presence_penalty for row in rows])
        self._frequency = _column([row.sampling.frequency_penalty for row in rows])

    def apply(self, logits: mx.array) -> mx.array:
        """`logits` [batch, vocab] as float32, with the rows of `index` changed."""
        assert self.index is not None
        changed = logits[self.index].astype(mx.float32) + self._bias
        present = self._counts > 0
        repeated = mx.where(changed > 0, changed / self._repetition, changed * self._repetition)
        changed = mx.where(self._read | present, repeated, changed)
        changed = changed - self._frequency * self._counts - self._presence * present
        logits = logits.astype(mx.float32)
        logits[self.index] = changed
        return logits

    def count(self, tokens: mx.array) -> None:
        """Count the new output tokens [batch]."""
        assert self.index is not None
        self._counts = self._counts.at[mx.arange(len(self.rows)), tokens[self.index]].add(1)

    def apply_window(self, logits: mx.array, drafts: mx.array) -> mx.array:
        """`logits` [batch, width, vocab] as float32: at each place as if `drafts` [batch, width - 1] before it had
        been counted."""
        assert self.index is not None
        counts, places = self._counts, []
        for place in range(logits.shape[1]):
            places.append(self.apply(logits[:, place]))
            if place < drafts.shape[1]:
                drafted = drafts[self.index, place]
                self._counts = self._counts.at[mx.arange(len(self.rows)), drafted].add(1)
        self._counts = counts
        return mx.stack(places, axis=1)

    def count_window(self, tokens: mx.array, kept: mx.array) -> None:
        """Count those of the new output tokens [batch, width] that are `kept`: 1 or 0 for each."""
        assert self.index is not None
        rows = mx.arange(len(self.rows))[:, None]
        self._counts = self._counts.at[rows, tokens[self.index]].add(kept[self.index].astype(mx.float32))

    def _joined(self, name: str, kept: list[int], fresh: list[np.ndarray]) -> mx.array:
        parts = [getattr(self, name)[mx.array(kept)]] if kept else []
        parts += [mx.array(np.stack(fresh))] if fresh else []
        return mx.concatenate(parts) if parts else mx.zeros((0, self._vocab_size))

    def _count_outputs(self, row: Row) -> np.ndarray:
        outputs = row.tokens[row.prompt_tokens :]
        return np.bincount(np.array(outputs, np.int64), minlength=self._vocab_size).astype(np.float32)

    def _mark_read(self, row: Row) -> np.ndarray:
        marks = np.zeros(self._vocab_size, np.bool_)
        marks[row.tokens[: row.prompt_tokens]] = True
        return marks

    def _spread_bias(self, row: Row) -> np.ndarray:
        bias = np.zeros(self._vocab_size, np.float32)
        for token, value in row.sampling.logit_bias.items():
            bias[token] = value
        return bias


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
