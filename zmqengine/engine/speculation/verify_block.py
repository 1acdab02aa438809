"""Verify blocks: one model call reads the last token of each row and its draft tokens, and verifies them.

The token at an output index depends on the tokens before it, a seed and that index, and on nothing else. The model's
own choice at every position of the block therefore decides: draft tokens are accepted up to the first that differs from
the choice, and that choice is output as well. The output equals the one without drafts; there is no ratio test, since
there is no second distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.row import Row


class Draft(NamedTuple):
    """Draft tokens of one row, and the name of their source."""

    tokens: Sequence[int]
    source: str


@dataclass(frozen=True)
class VerifyBlock:
    """A verify block: the last token of each row and its draft tokens, padded to `width` tokens a row.

    `drafts`: one for each row, or None. `inputs` [rows, width]: what the model reads. `drafted` [rows, width - 1]:
    draft tokens, -1 where there is none, which equals no token.
    """

    drafts: list[Draft | None]
    width: int
    inputs: mx.array
    drafted: mx.array

    @classmethod
    def of(cls, rows: Sequence[Row], drafts: list[Draft | None], widths: Sequence[int] = ()) -> VerifyBlock:
        """The verify block of `rows`, whose tokens are all known: of the smallest of the ascending `widths` that fits
        every draft, or else of the longest draft."""
        width = 1 + max(len(draft.tokens) for draft in drafts if draft is not None)
        width = next((known for known in widths if known >= width), width)
        drafted = np.full((len(rows), width - 1), -1, np.int32)
        for index, draft in enumerate(drafts):
            if draft is not None:
                drafted[index, : len(draft.tokens)] = draft.tokens
        last = np.array([row.tokens[-1] for row in rows], np.int32)
        inputs = np.concatenate([last[:, None], np.maximum(drafted, 0)], axis=1)
        return cls(drafts, width, mx.array(inputs.astype(np.uint32)), mx.array(drafted))

    @property
    def draft_tokens(self) -> list[Sequence[int]]:
        return [() if draft is None else draft.tokens for draft in self.drafts]

    def accepted(self, index: int, tokens: Sequence[int]) -> int:
        """The number of draft tokens of row `index` that equal the sampled `tokens`, up to the first that differs."""
        draft = self.drafts[index]
        count = 0
        if draft is not None:
            while count < len(draft.tokens) and draft.tokens[count] == tokens[count]:
                count += 1
        return count
