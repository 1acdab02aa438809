"""Forward passes of texts in few shapes: each is traced once, then replayed in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from zmqengine.checkpoint.encoder_batch import SCORES_BYTES_MAX
from zmqengine.engine.embedding.padded import Padded
from zmqengine.engine.kv.few_sizes import few_sizes

ROWS_BY_POWER, TOKENS_BY_POWER = 8, 64
"""Up to these, rows and tokens of a shape are powers of two, beyond them four numbers between two powers: few shapes
are traced, and padding of batches that fill the device is at most a quarter in each direction."""


class Replays:
    """`forward` of batches of texts, from a `Padded` to vectors, in few shapes.

    For a device that waits for the host, which calls no Python here. `context_tokens`: most tokens of a text, beyond
    which there are no positions for padding either. `free_tokens`: tokens that take the device no longer than it takes
    to launch them. `tokens_max`: most tokens of a shape. Attention scores of a shape, of as many `heads`, take at most
    `SCORES_BYTES_MAX`.
    """

    def __init__(
        self,
        forward: Callable[[Padded], mx.array],
        *,
        context_tokens: int,
        free_tokens: int,
        tokens_max: int,
        heads: int,
    ) -> None:
        self._traced = mx.compile(lambda *given: forward(Padded(*given)))
        self._context_tokens = context_tokens
        self._free_tokens = free_tokens
        self._tokens_max = tokens_max
        self._scores_max = SCORES_BYTES_MAX // (4 * heads)

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> ReplayJob | None:
        """A job for these texts; None if one of them needs a larger shape."""
        counts = np.array(list(map(len, texts)))
        order = (-counts).argsort(kind="stable")
        longest = int(counts[order[0]])
        if not self._fits(1, self._columns(longest), longest):
            return None
        parts, tokens = [], 0
        for taken in self._shapes(counts, order):
            rows, columns = rounded(len(taken), ROWS_BY_POWER), self._columns(int(counts[taken[0]]))
            given = [_rectangle([texts[text] for text in taken], rows, columns), np.ones((rows, 1), np.int32)]
            given[1][: len(taken), 0] = counts[taken]
            if any(second):
                given.append(np.zeros((rows, 1), np.int32))
                given[2][: len(taken), 0] = np.array(second)[taken]
            parts.append((self._traced(*map(mx.array, given)), len(taken)))
            tokens += rows * columns
        return ReplayJob(parts, order, tokens)

    def _shapes(self, counts: np.ndarray, order: np.ndarray) -> Iterator[np.ndarray]:
        """Indices of texts that share a shape, the longest first."""
        while len(order):
            columns = self._columns(int(counts[order[0]]))
            tokens = counts[order].cumsum()
            rows = len(order)
            while rows > 1 and not self._fits(rows, columns, tokens[rows - 1]):
                rows -= 1
            yield order[:rows]
            order = order[rows:]

    def _fits(self, rows: int, columns: int, tokens: int) -> bool:
        """Whether texts of `tokens` may share a shape: at most half of it is padding, or as much as takes no longer
        than to launch another shape."""
        size = rounded(rows, ROWS_BY_POWER) * columns
        most = min(self._tokens_max, tokens + max(self._free_tokens, tokens))
        return size <= most and size * columns <= self._scores_max

    def _columns(self, length: int) -> int:
        return max(length, min(rounded(length, TOKENS_BY_POWER), self._context_tokens))


class ReplayJob:
    """A batch in one call, or in one for each of its shapes: a `Job` of one part.

    `parts`: vectors of each shape, and its number of texts; `order`: the texts' indices.
    """

    def __init__(self, parts: Sequence[tuple[mx.array, int]], order: np.ndarray, tokens: int) -> None:
        self._parts = parts
        self._order = order
        self._tokens = tokens
        self.is_launched = False

    def step(self, tokens_max: int) -> int:
        """Launch all of it; returns the tokens with padding, as these take the time."""
        self.is_launched = True
        mx.async_eval([vectors for vectors, _ in self._parts])  # type: ignore[no-untyped-call]
        return self._tokens

    def result(self) -> np.ndarray:
        """The vectors, once they are computed."""
        vectors = np.concatenate([np.array(vectors)[:count] for vectors, count in self._parts])
        return vectors[self._order.argsort()]


def _rectangle(texts: Sequence[Sequence[int]], rows: int, columns: int) -> np.ndarray:
    """Token ids of texts with padding, (rows, columns)."""
    ids = np.zeros((rows, columns), np.uint32)
    for row, text in enumerate(texts):
        # Padding repeats a token of the text: nothing that is not finite comes to it from one that it does not have.
        ids[row] = text[0]
        ids[row, : len(text)] = text
    return ids


def rounded(count: int, by_power: int) -> int:
    """`count`, at least 1, up to a power of two, and beyond `by_power` up to one of four numbers between two powers."""
    power = 1 << (count - 1).bit_length()
    return power if power <= by_power else few_sizes(count)
