"""Texts of different lengths one after the other, for kernels that find the text of a token in a table."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from zmqengine.engine.embedding.packing import split_heads
from zmqengine.engine.models.text_ops import LayerStack, Tables, TextKernels


class Ragged:
    """A `TextBatch` in float32 on CUDA without padding between texts, in operations that depend on its shape alone.

    `tokens` (4 or 5, tokens): ids, positions, types if a text is a pair, the first token of each token's text, and the
    one behind its last. `texts` (2, texts): the first token of each, and the one behind its last. Tokens without a text
    have one of their own, and texts may have no tokens.
    """

    def __init__(self, kernels: TextKernels, tokens: mx.array, texts: mx.array) -> None:
        self._kernels = kernels
        self._tables = tokens, texts
        self._spans, self._texts = tokens[-2:].reshape(-1), texts.reshape(-1)
        # An index would be a kernel, a slice is none.
        self.ids, positions, *types = (row.reshape(-1) for row in mx.split(tokens[:-2], len(tokens) - 2))
        self.positions = self.offset = positions
        self.types: mx.array | None = types[0] if types else None
        self._arrivals: mx.array | None = None

    def embed(self, tables: Tables) -> mx.array:
        """The embedded tokens, normalised; to be called once, before the others, which then read less of the host's
        memory."""
        found = self._kernels.embed(*self._tables, tables)
        states, self._spans, self.positions, self._texts, self._arrivals = found
        self.offset = self.positions
        return states

    def layers(self, states: mx.array, stack: LayerStack) -> mx.array:
        """The sums before the last norm of a `stack` of layers; to be called once, after `embed`."""
        assert self._arrivals is not None
        return self._kernels.layers(states, self._spans, self._arrivals, stack)

    def heads(self, states: mx.array, counts: Sequence[int]) -> list[mx.array]:
        return split_heads(states, len(self.ids), counts)

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
        return self._kernels.attend(
            queries, keys, values, self._spans, scale=scale, window=window, slopes=slopes
        )

    def first(self, states: mx.array) -> mx.array:
        return states[mx.split(self._texts, 2)[0]]

    def last(self, states: mx.array) -> mx.array:
        return states[mx.split(self._texts, 2)[1] - 1]

    def mean(self, states: mx.array) -> mx.array:
        return self._kernels.pool(states, self._texts, largest=False)

    def most(self, states: mx.array) -> mx.array:
        return self._kernels.pool(states, self._texts, largest=True)
