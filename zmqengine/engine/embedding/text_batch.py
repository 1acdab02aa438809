"""The interface of a batch of texts, as encoders use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class TextBatch(Protocol):
    """A batch of texts. `ids`, `positions` and `types` have one entry for each token.

    Linear layers and norms work on arrays (tokens, width), and only attention tells texts apart.
    """

    ids: mx.array
    positions: mx.array

    @property
    def types(self) -> mx.array | None:
        """Parts of pairs: 1 for tokens of the second text of a pair, else 0. None if no text is a pair."""
        ...

    def heads(self, states: mx.array, counts: Sequence[int]) -> list[mx.array]:
        """(tokens, sum of `counts` * width) as arrays (texts, count, tokens of the longest, width)."""
        ...

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        window: int | None = None,
        slopes: mx.array | None = None,
    ) -> mx.array:
        """Attention of every token to all of its text, or those at most `window` tokens away.

        Takes arrays (texts, heads, tokens, head width) from `heads`, and returns (tokens, width). `slopes` (heads,),
        the same in all layers: what a score loses with every token of distance (ALiBi).
        """
        ...

    def first(self, states: mx.array) -> mx.array:
        """The states of each text's first token."""
        ...

    def last(self, states: mx.array) -> mx.array:
        """The states of each text's last token."""
        ...

    def mean(self, states: mx.array) -> mx.array:
        """The mean state of each text, in float32."""
        ...

    def most(self, states: mx.array) -> mx.array:
        """The largest value of each text in every column."""
        ...
