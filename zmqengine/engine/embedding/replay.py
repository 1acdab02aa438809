"""Forward passes of small batches of texts: traced once for each shape, then replayed in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from zmqengine.checkpoint.encoder_batch import SCORES_BYTES_MAX
from zmqengine.engine.embedding.padded import Padded

ROWS_BY_POWER, TOKENS_BY_POWER = 8, 64
"""Up to these, rows and tokens of a shape are powers of two, beyond them four numbers between two powers: few shapes
are traced, and padding of batches that fill the device is at most a quarter in each direction."""


class Replays:
    """`forward` of small batches of texts, from a `Padded` to vectors.

    For a device that waits for the host: padding costs it little, and the host calls no Python. `context_tokens`: most
    tokens of a text, beyond which there are no positions for padding either. `tokens_max`: most tokens of a shape.
    Attention scores of a shape, of as many `heads`, take at most `SCORES_BYTES_MAX`.
    """

    def __init__(
        self, forward: Callable[[Padded], mx.array], *, context_tokens: int, tokens_max: int, heads: int
    ) -> None:
        self._traced = mx.compile(lambda *given: forward(Padded(*given)))
        self._context_tokens = context_tokens
        self._tokens_max = tokens_max
        self._heads = heads

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> ReplayJob | None:
        """A job for these texts; None if they need a larger shape."""
        rows = rounded(len(texts), ROWS_BY_POWER)
        longest = max(map(len, texts))
        columns = max(longest, min(rounded(longest, TOKENS_BY_POWER), self._context_tokens))
        scores_bytes = 4 * self._heads * rows * columns * columns
        if rows * columns > self._tokens_max or scores_bytes > SCORES_BYTES_MAX:
            return None
        ids = np.zeros((rows, columns), np.uint32)
        lengths = np.ones((rows, 1), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            # Nothing that is not finite comes to a text from a token that it does not have.
            ids[row, len(text) :] = text[0]
            lengths[row] = len(text)
        given = [ids, lengths]
        if any(second):
            given.append(np.zeros((rows, 1), np.int32))
            given[-1][: len(texts), 0] = second
        return ReplayJob(self._traced(*map(mx.array, given)), len(texts), ids.size)


class ReplayJob:
    """A batch in one call: a `Job` of one part."""

    def __init__(self, vectors: mx.array, texts: int, tokens: int) -> None:
        self._vectors = vectors
        self._texts = texts
        self._tokens = tokens
        self.is_launched = False

    def step(self, tokens_max: int) -> int:
        """Launch all of it; returns the tokens with padding, as these take the time."""
        self.is_launched = True
        mx.async_eval(self._vectors)  # type: ignore[no-untyped-call]
        return self._tokens

    def result(self) -> np.ndarray:
        """The vectors, once they are computed."""
        return np.array(self._vectors)[: self._texts]


def rounded(count: int, by_power: int) -> int:
    """`count`, at least 1, up to a power of two, and beyond `by_power` up to one of four numbers between two powers."""
    power = 1 << (count - 1).bit_length()
    step = power if power <= by_power else power // 8
    return -(-count // step) * step
