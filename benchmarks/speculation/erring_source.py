"""A draft source of a set accuracy, to measure the cost of speculation apart from the quality of a source."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from zmqengine.engine.row import Row


class ErringSource:
    """Knows each row's output, by its prompt, and errs on purpose: a token is right with the chance `right`.

    It drafts at most `tokens_max` at a time.
    """

    name = "set"
    prior = 0.5

    def __init__(
        self, outputs: Mapping[tuple[int, ...], Sequence[int]], right: float, tokens_max: int
    ) -> None:
        self._outputs = outputs
        self._tokens_max = tokens_max
        self._right = right
        self._random = random.Random(str(sorted(outputs)))

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """The tokens to come, but for the errors."""
        return [
            self._draft(row, min(count, self._tokens_max)) for row, count in zip(rows, counts, strict=True)
        ]

    def release(self) -> None:
        """Nothing to drop."""

    def clear(self) -> None:
        """Nothing to drop."""

    def _draft(self, row: Row, count: int) -> list[int]:
        output = self._outputs[tuple(row.tokens[: row.prompt_tokens])]
        made = len(row.tokens) - row.prompt_tokens
        coming = output[made : made + count]
        return [token if self._random.random() < self._right else max(0, token - 1) for token in coming]
