"""Verify blocks: one model call reads the last token of each row and its draft tokens, and verifies them.

The token at an output index depends on the tokens before it, a seed and that index, and on nothing else. The model's
own choice at every position of the block therefore decides: draft tokens are accepted up to the first that differs from
the choice, and that choice is output as well (`Step.land`). The output equals the one without drafts; there is no ratio
test, since there is no second distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Draft(NamedTuple):
    """Draft tokens of one row, and the name of their source."""

    tokens: Sequence[int]
    source: str


@dataclass(frozen=True)
class VerifyBlock:
    """The draft tokens of the rows in decode, or None, and the `width` of the sampled logits: one of few."""

    drafts: list[Draft | None]
    width: int

    @classmethod
    def of(cls, drafts: list[Draft | None], widths: Sequence[int] = ()) -> VerifyBlock:
        """The verify block of these drafts: of the smallest of the ascending `widths` that fits each, or else of the
        longest."""
        width = 1 + max(len(draft.tokens) for draft in drafts if draft is not None)
        return cls(drafts, next((known for known in widths if known >= width), width))

    @property
    def draft_tokens(self) -> list[Sequence[int]]:
        """The draft tokens of each row."""
        return [() if draft is None else draft.tokens for draft in self.drafts]
