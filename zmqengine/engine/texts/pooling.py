"""The pooling of texts that a model reads in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx


def unit(vectors: mx.array) -> mx.array:
    """Vectors of length 1."""
    width = vectors.shape[-1]
    # One kernel on a GPU: the root of the mean square is the length but for a factor. A constant broadcast is none.
    factor = mx.broadcast_to(mx.array(width**-0.5, vectors.dtype), (width,))
    return mx.fast.rms_norm(vectors, factor, 1e-24)


class Pooling:
    """The pooling of texts that are read in parts, from hidden states (texts, tokens, width) padded at the end."""

    def __init__(self, kind: str, dense: Sequence[Callable[[mx.array], mx.array]]) -> None:
        self.kind = kind
        self._dense = dense

    def add(
        self,
        before: mx.array | None,
        hidden: mx.array,
        tokens: list[int],
        *,
        is_first: bool,
        is_last: bool,
    ) -> mx.array | None:
        """Pooled states (texts, width) with those of the next `tokens` of each text, from those `before`.

        None if nothing of these texts is needed yet.
        """
        if self.kind == "last":
            return _column(hidden, [count - 1 for count in tokens]) if is_last else None
        if self.kind == "cls":
            return _column(hidden, [0] * len(tokens)) if is_first else before
        states = hidden.astype(mx.float32)
        inside = mx.arange(hidden.shape[1])[None, :, None] < mx.array(tokens)[:, None, None]
        if self.kind == "max":
            most = mx.where(inside, states, -mx.inf).max(axis=1)
            return most if before is None else mx.maximum(before, most)
        total = mx.where(inside, states, 0).sum(axis=1)
        return total if before is None else before + total

    def vectors(self, pooled: mx.array, lengths: list[int]) -> mx.array:
        """Vectors of length 1 of texts of these lengths, all of whose tokens are pooled."""
        if self.kind == "mean":
            pooled = pooled / mx.array(lengths)[:, None].astype(mx.float32)
        for dense in self._dense:
            pooled = dense(pooled)
        return unit(pooled)


def _column(hidden: mx.array, columns: list[int]) -> mx.array:
    places = mx.array(columns)[:, None, None]
    return mx.take_along_axis(hidden, places, axis=1)[:, 0].astype(mx.float32)
