"""Drafts of a set quality, for the cost of speculation apart from the wit of a source."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from zmqengine.engine.row import Row
from zmqengine.engine.speculation.source import Outlook


class ErringSource:
    """Knows each row's output, by its prompt, and errs on purpose: a token is right with the chance `right`.

    It drafts at most `tokens_max` at a time.
    """

    name = "set"

    def __init__(
        self, outputs: Mapping[tuple[int, ...], Sequence[int]], right: float, tokens_max: int
    ) -> None:
        self._outputs = outputs
        self._tokens_max = tokens_max
        self._right = right
        self._random = random.Random(str(sorted(outputs)))

    def follow(self, row: Row) -> Outlook | None:
        """Always the same."""
        return Outlook(self._right, self._right, self._tokens_max, lasts=True)

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        """What comes, but for the errors."""
        return [self._draft(row, count) for row, count in zip(rows, tokens_max, strict=True)]

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """It knows."""

    def _draft(self, row: Row, count: int) -> list[int]:
        output = self._outputs[tuple(row.tokens[: row.prompt_tokens])]
        made = len(row.tokens) - row.prompt_tokens
        coming = output[made : made + count]
        return [token if self._random.random() < self._right else max(0, token - 1) for token in coming]
