"""Forward passes of texts in few shapes: each is traced once, then replayed in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import mlx.core as mx
import numpy as np

from zmqengine.checkpoint.encoder_batch import SCORES_BYTES_MAX
from zmqengine.engine.autotune.variants import fastest, same_but_for_rounding
from zmqengine.engine.embedding.host_memory import VECTORS_SIZE, HostMemory
from zmqengine.engine.embedding.padded import Padded
from zmqengine.engine.embedding.product import products_in_kernels
from zmqengine.engine.embedding.ragged import Ragged
from zmqengine.engine.models.few_sizes import few_sizes
from zmqengine.engine.models.text_ops import TextKernels

ROWS_BY_POWER, TOKENS_BY_POWER = 8, 64
"""Up to these, rows and tokens of a shape are powers of two, beyond them four numbers between two powers: few shapes
are traced, and padding of batches that fill the device is at most a quarter in each direction."""
_TUNED_TOKENS, _TUNED_LENGTH = (32, 64, 128, 256, 512, 1024, 2048, 4096), 16
"""Tokens of batches for which products in kernels are timed, of texts of this length, until cuBLAS wins: the more
tokens, the less of the time is the launch, which it makes slow. Each is timed, as new kernels are compiled then."""

log = logging.getLogger("zmqengine.engine")


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


class RaggedReplays:
    """`Replays` without padding between texts, for `Ragged`: a batch is one shape, and few shapes differ.

    Up to some number of tokens products are our kernels, or all layers are one kernel: `in_one`, where there is one.
    """

    def __init__(
        self,
        forward: Callable[[Ragged], mx.array],
        kernels: TextKernels,
        *,
        heads: int,
        in_one: Callable[[Ragged], mx.array] | None = None,
    ) -> None:
        def delivered(vectors: mx.array, memory: mx.array) -> mx.array:
            self._width = vectors.shape[1]
            return kernels.deliver(vectors, memory) if vectors.size <= VECTORS_SIZE else vectors

        def in_cublas(memory: mx.array, *given: mx.array) -> mx.array:
            return delivered(forward(Ragged(kernels, *given)), memory)

        def in_kernels(memory: mx.array, *given: mx.array) -> mx.array:
            with products_in_kernels(kernels):
                return delivered((in_one or forward)(Ragged(kernels, *given)), memory)

        self._traced: dict[str, Callable[..., mx.array]] = {
            "cuBLAS": mx.compile(in_cublas),
            "kernels": mx.compile(in_kernels),
        }
        self._width = 0
        # A batch is built while the one before it is computed.
        self._memories = HostMemory(), HostMemory()
        self._in_kernels_max = 0
        self._tokens_max = int((SCORES_BYTES_MAX / (4 * heads)) ** 0.5)

    def tune(self) -> None:
        """Find the number of tokens up to which kernels are faster, which make the same vectors but for rounding."""
        for size in _TUNED_TOKENS:
            if self._fastest(size) != "kernels":
                break
            self._in_kernels_max = size

    def _fastest(self, size: int) -> str:
        count = size // _TUNED_LENGTH
        given = [*map(mx.array, _tables([[1] * _TUNED_LENGTH] * count, []))]
        variants = {
            name: partial(traced, memory.vectors, *given)
            for (name, traced), memory in zip(self._traced.items(), self._memories, strict=True)
        }

        def agree(got: mx.array, wanted: mx.array) -> bool:
            expected, found = (
                mx.array(RaggedJob(made, memory, count, self._width, size).result())
                for made, memory in zip((wanted, got), self._memories, strict=True)
            )
            return same_but_for_rounding(found, expected)

        # One call at a time: kernels whose blocks wait for one another must not share the device.
        timing = fastest(variants, calls=1, agree=agree)
        log.info("products of texts", extra={"tokens": size, **timing.microseconds})
        return timing.best

    def begin(self, texts: Sequence[Sequence[int]], second: Sequence[int]) -> RaggedJob | None:
        """A job for these texts; None if one of them is so long that MLX's products are faster than the kernel."""
        if max(map(len, texts)) > self._tokens_max:
            return None
        tables = _tables(texts, second)
        size = tables[0].shape[1]
        memory, other = self._memories
        self._memories = other, memory
        given = memory.fill(tables)
        made = self._traced["kernels" if size <= self._in_kernels_max else "cuBLAS"](memory.vectors, *given)
        job = RaggedJob(made, memory, len(texts), self._width, size)
        memory.user = job
        return job


class RaggedJob:
    """A batch of `count` texts in one call: a `Job` of one part.

    `made`: an array that is computed once the vectors are in `memory`, or the vectors themselves where they exceed it.
    """

    def __init__(self, made: mx.array, memory: HostMemory, count: int, width: int, tokens: int) -> None:
        self._made = made
        self._memory = memory
        self._shape = count, width
        self._tokens = tokens
        self._vectors: np.ndarray | None = None
        self.is_launched = False

    def step(self, tokens_max: int) -> int:
        """Launch all of it; returns the tokens with padding, as these take the time."""
        self.is_launched = True
        mx.async_eval(self._made)  # type: ignore[no-untyped-call]
        return self._tokens

    def result(self) -> np.ndarray:
        """The vectors, once they are computed."""
        if self._vectors is None:
            mx.eval(self._made)
            count, _ = self._shape
            is_delivered = self._made.ndim == 1
            self._vectors = self._memory.read(*self._shape) if is_delivered else np.array(self._made)[:count]
        return self._vectors


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


def _tables(texts: Sequence[Sequence[int]], second: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of `Ragged`, of sizes that are few."""
    lengths = np.array(list(map(len, texts)))
    ends = lengths.cumsum()
    used = int(ends[-1])
    size = rounded(used, TOKENS_BY_POWER)
    tokens = np.zeros((5 if any(second) else 4, size), np.int32)
    tokens[0, :used] = np.fromiter(chain.from_iterable(texts), np.int32, used)
    # Padding is as many texts of one token, whose id is 0.
    tokens[-2] = np.arange(size)
    tokens[-1] = tokens[-2] + 1
    tokens[-2, :used] = (ends - lengths).repeat(lengths)
    tokens[-1, :used] = ends.repeat(lengths)
    tokens[1] = np.arange(size) - tokens[-2]
    if any(second):
        starts = np.array(second).repeat(lengths)
        tokens[2, :used] = (starts > 0) & (tokens[1, :used] >= starts)
    spans = np.zeros((2, rounded(len(texts), ROWS_BY_POWER)), np.int32)
    spans[:, : len(texts)] = ends - lengths, ends
    return tokens, spans


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
