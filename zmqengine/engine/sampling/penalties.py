"""Logit bias and penalties, kept as arrays for just the rows that use them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.row import Row
from zmqengine.sampling_params import Sampling

PENALISED = Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={1: 1.0})
"""Every bias and penalty at once, to be compiled before a request asks for them."""


def uses_penalties(sampling: Sampling) -> bool:
    """Whether a row's logits are changed before sampling."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


class Penalties:
    """Changes the logits of those rows of a batch that have a bias or a penalty.

    `index`: their indices in the batch, None if there are none. First the bias is added. Then the repetition penalty
    divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al., arXiv:1909.05858).
    Then the frequency penalty times its count in the output, and the presence penalty if it is in the output, are
    subtracted from each token's logit (the OpenAI API's definition).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[Row] = []
        self.index: mx.array | None = None

    def set_rows(self, batch: Sequence[Row]) -> None:
        """Follow a change of the batch: remaining rows keep their state, new ones compute it from their tokens."""
        known = {id(row): index for index, row in enumerate(self.rows)}
        indices = [index for index, row in enumerate(batch) if uses_penalties(row.sampling)]
        # New rows come last here, whatever their index in the batch.
        indices.sort(key=lambda index: id(batch[index]) not in known)
        rows = [batch[index] for index in indices]
        self.index = mx.array(indices) if indices else None
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

    def apply(self, logits: mx.array, drafted: mx.array | None = None) -> mx.array:
        """`logits` [batch, width, vocab] as float32, with the rows of `index` changed.

        At each position the draft tokens before it, `drafted` [batch, width - 1], count as output.
        """
        if drafted is None:
            return self._apply(logits[:, -1])[:, None]
        counts, positions = self._counts, []
        for position in range(logits.shape[1]):
            positions.append(self._apply(logits[:, position]))
            if position < drafted.shape[1]:
                # A missing draft token counts as token 0, at positions whose logits are not used.
                tokens = mx.maximum(drafted[self.index, position], 0)
                self._counts = self._counts.at[mx.arange(len(self.rows)), tokens].add(1)
        self._counts = counts
        return mx.stack(positions, axis=1)

    def count(self, tokens: mx.array, drafted: mx.array | None = None) -> None:
        """Count the new output tokens [batch, width]: the first, and each after an accepted draft token."""
        assert self.index is not None
        rows = mx.arange(len(self.rows))
        if drafted is None:
            self._counts = self._counts.at[rows, tokens[self.index, 0]].add(1)
            return
        is_output = mx.concatenate(
            [
                mx.ones((tokens.shape[0], 1), mx.int32),
                mx.cumprod((drafted == tokens[:, :-1].astype(mx.int32)).astype(mx.int32), axis=-1),
            ],
            axis=-1,
        )
        added = is_output[self.index].astype(mx.float32)
        self._counts = self._counts.at[rows[:, None], tokens[self.index]].add(added)

    def _apply(self, logits: mx.array) -> mx.array:
        assert self.index is not None
        changed = logits[self.index].astype(mx.float32) + self._bias
        present = self._counts > 0
        repeated = mx.where(changed > 0, changed / self._repetition, changed * self._repetition)
        changed = mx.where(self._read | present, repeated, changed)
        changed = changed - self._frequency * self._counts - self._presence * present
        logits = logits.astype(mx.float32)
        logits[self.index] = changed
        return logits

    def _joined(self, name: str, kept: list[int], fresh: list[np.ndarray]) -> mx.array:
        parts = [getattr(self, name)[mx.array(kept)]] if kept else []
        parts += [mx.array(np.stack(fresh))] if fresh else []
        return mx.concatenate(parts) if parts else mx.zeros((0, self._vocab_size))

    def _count_outputs(self, row: Row) -> np.ndarray:
        outputs = row.tokens[row.prompt_tokens :]
        return np.bincount(np.array(outputs, np.int64), minlength=self._vocab_size).astype(np.float32)

    def _mark_read(self, row: Row) -> np.ndarray:
        marks = np.zeros(self._vocab_size, np.bool_)
        marks[row.prompt] = True
        return marks

    def _spread_bias(self, row: Row) -> np.ndarray:
        bias = np.zeros(self._vocab_size, np.float32)
        for token, value in row.sampling.logit_bias.items():
            bias[token] = value
        return bias


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
