"""Operations of a decoder layer for decode steps on a CPU, in float32 and through NumPy.

MLX multiplies one token by weights as it does many: BLAS copies the weights first, which takes as long as the product.
NumPy calls BLAS for a vector, which reads them once. It also has a vectorised exp, and writes into caches in place.
Everything is computed at once: to wait for MLX takes 50 us.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.decoder_weights import (
    DecoderWeights,
    Experts,
    Gated,
    HeadShape,
    Linear,
    Norm,
    RotaryEmbedding,
)
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.tree import arrays_of

# NumPy's where `Ops` has MLX's.
Array: TypeAlias = Any

# Added to scores of columns that a token does not see. Finite: padding that sees nothing must not become NaN.
UNSEEN = np.float32(-1e30)
# Up to this many tokens, a product with each takes less time than one with all: 75 MB of weights take 4.1, 6.2, 7.5
# and 9.0 ms for 1 to 4 tokens apart, and 10 to 12 for 1 to 5 together.
_TOKENS_APART_MAX = 4


def supports(weights: DecoderWeights) -> bool:
    """Whether `StepOps` computes this model: all weights are in float32, and there is no mixture of experts."""
    if any(array.dtype != mx.float32 for array in arrays_of(weights)):
        return False
    return all(
        isinstance(layer.mlp, Gated) and not layer.heads.rotation.traditional for layer in weights.layers
    )


class StepOps(PlainOps):
    """`Ops` on arrays of NumPy; weights are too, in the memory of MLX's. Caches remain MLX's."""

    def __init__(self) -> None:
        super().__init__()
        # Cosines and sines of the present step, by segment and rotation.
        self._angles: dict[Hashable, tuple[Array, Array]] = {}

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """See `Ops`."""
        return np.concatenate(arrays)

    def embed(self, tokens: mx.array, embedding: Linear) -> Array:
        """See `Ops`. A step begins."""
        self._angles = {}
        return embedding.weight[np.asarray(tokens)]

    def norm(self, hidden: Array, norm: Norm) -> Array:
        """See `Ops`."""
        return _normed(hidden, norm.eps) * norm.weight

    def product(self, inputs: Array, *linears: Linear) -> Array:
        """See `Ops`."""
        found: list[Array] = []
        for linear in linears:
            if len(inputs) <= _TOKENS_APART_MAX:
                made = (inputs[:, None] @ linear.transposed)[:, 0]
            else:
                made = inputs @ linear.transposed
            found.append(made if linear.bias is None else made + linear.bias)
        return found[0] if len(found) == 1 else np.concatenate(found, axis=-1)

    def mlp(self, inputs: Array, mlp: Gated | Experts) -> Array:
        """See `Ops`."""
        gate, up = np.split(self.product(inputs, *mlp.gate_up), 2, axis=-1)
        return self.product(gate / (1 + np.exp(-gate)) * up, mlp.down)

    def rotate(self, product: Array, heads: HeadShape, offset: mx.array | int, rows: int) -> Sequence[Array]:
        """See `Ops`."""
        count = heads.heads + heads.key_heads
        every = product.reshape(rows, -1, count + heads.key_heads, heads.dim).swapaxes(1, 2)
        rotated, values = every[:, :count], every[:, count:]
        if heads.norms is not None:
            rotated = _normed(rotated, heads.norms.eps) * heads.norms.both
        cos, sin = self._cos_sin(heads.rotation, offset, rows, rotated.shape[2])
        dims = heads.rotation.dims
        first, second = rotated[..., : dims // 2], rotated[..., dims // 2 : dims]
        parts = [first * cos - second * sin, second * cos + first * sin, rotated[..., dims:]]
        rotated = np.concatenate(parts, axis=-1)
        return rotated[:, : heads.heads], rotated[:, heads.heads :], values

    def mask(self, cache: Any, width: int, window: int | None) -> Array | None:
        """See `Ops`: the numbers to add to scores."""
        mask = super().mask(cache, width, window)
        assert not isinstance(mask, str), "caches of a batch have a mask for each row"
        return None if mask is None else to_add(mask)

    def attend(
        self, qkv: Sequence[Array], heads: HeadShape, offset: mx.array | int, cache: Any, mask: Array | None
    ) -> Array:
        """See `Ops`."""
        queries, new_keys, new_values = qkv
        keys, values = _written(cache, new_keys, new_values)
        return attend_few(queries, keys, values, heads.scale, mask)

    def _cos_sin(
        self, rotation: RotaryEmbedding, offset: mx.array | int, rows: int, width: int
    ) -> tuple[Array, Array]:
        """Cosines and sines [rows, 1, width, pairs] of a segment's positions, as MLX rounds them: it has rotated the
        keys of prompts."""
        key = id(offset), *rotation[:4], id(rotation.freqs), rotation.factor
        if key not in self._angles:
            ones = mx.full((rows, 1, width, rotation.dims // 2), rotation.factor)
            turned = mx.fast.rope(
                mx.concatenate([ones, mx.zeros_like(ones)], axis=-1),
                rotation.dims,
                traditional=False,
                base=rotation.base,
                scale=rotation.scale,
                offset=offset,
                freqs=None if rotation.freqs is None else mx.array(rotation.freqs),
            )
            cos, sin = np.split(np.asarray(turned), 2, axis=-1)
            self._angles[key] = cos, sin
        return self._angles[key]


def attend_few(queries: Array, keys: Array, values: Array, scale: float, unseen: Array | None) -> Array:
    """Attention of a few tokens of each row, [rows, heads, width, dim]; `unseen`: numbers to add to scores."""
    rows, _, width, dim = queries.shape
    key_heads, columns = keys.shape[1:3]
    grouped = (queries * np.float32(scale)).reshape(rows, key_heads, -1, dim)
    # BLAS multiplies many columns by a few queries up to four times as fast as these by those.
    scores = np.ascontiguousarray((keys @ grouped.swapaxes(-1, -2)).swapaxes(-1, -2))
    if unseen is not None:
        by_head = scores.reshape(rows, key_heads, -1, width, columns)
        # Masks of rows have one for all heads, which are two axes here.
        by_head += unseen[:, :, None] if unseen.ndim == 4 else unseen
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    found = scores @ values
    found /= scores.sum(axis=-1, keepdims=True)
    return found.reshape(queries.shape)


def to_add(mask: mx.array) -> Array:
    """The numbers that a mask adds to scores."""
    return np.where(np.asarray(mask), np.float32(0), UNSEEN)


def _normed(states: Array, eps: float) -> Array:
    mean = np.square(states).mean(axis=-1, keepdims=True)
    return states / np.sqrt(mean + np.float32(eps))


def _written(cache: Any, keys: Array, values: Array) -> tuple[Array, Array]:
    """All keys and values of a layer, with those of the step, which are written in place where they may be."""
    width = keys.shape[2]
    # Caches of a batch; mlx-lm's have no such method.
    can_write_here = getattr(cache, "can_write_here", None)
    if can_write_here is None or not can_write_here(width, mx.float32):
        every = cache.update_and_fetch(mx.array(keys), mx.array(values))
        mx.eval(every)
        return np.asarray(every[0]), np.asarray(every[1])
    cache.wrote_in_place(width, cache.keys)
    start, stop = cache.size() - width, cache.size()
    known = np.asarray(cache.keys)[:, :, :stop], np.asarray(cache.values)[:, :, :stop]
    known[0][:, :, start:], known[1][:, :, start:] = keys, values
    return known
