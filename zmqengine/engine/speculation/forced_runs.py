"""Draft tokens that a grammar forces, such as the name of a required field."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.row import Row


class ForcedRuns:
    """Drafts for rows with a grammar. A grammar forces characters, which the model may write in other tokens."""

    name = "grammar"
    prior = 0.8

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """The forced characters in the tokenizer's own tokens."""
        return [
            row.matcher.forced[:count] if row.matcher is not None and row.matcher.begun else ()
            for row, count in zip(rows, counts, strict=True)
        ]

    def release(self) -> None:
        """Nothing to drop: the matcher belongs to the row."""

    def clear(self) -> None:
        """Nothing to drop."""
