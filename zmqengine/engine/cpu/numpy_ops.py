"""Operations of a decoder layer through NumPy, in float32. Everything is computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from zmqengine.engine.cpu.numpy_attention import NumpyAttention, NumpyStorage
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Norm, RotaryEmbedding
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.tree import arrays_of, filled, parts_of

# NumPy's where `Ops` has MLX's.
Array: TypeAlias = Any

# Up to this many tokens, a product with each takes less time than one with all: 75 MB of weights take 4.1, 6.2, 7.5
# and 9.0 ms for 1 to 4 tokens apart, and 10 to 12 for 1 to 5 together.
_TOKENS_APART_MAX = 4


def supports(weights: DecoderWeights) -> bool:
    """Whether `NumpyOps` computes this model: all weights are in float32, and there is no mixture of experts."""
    if any(array.dtype != mx.float32 for array in arrays_of(weights)):
        return False
    return (
        all(isinstance(layer.mixer, HeadShape) for layer in weights.layers)
        and not parts_of(weights, Experts)
        and all(mlp.activation == "silu" for mlp in parts_of(weights, Gated))
        and weights.embedding_scale == 1.0
        and weights.logits_cap is None
        and all(heads.is_plain for heads in parts_of(weights, HeadShape))
        and not any(rotation.traditional for rotation in parts_of(weights, RotaryEmbedding))
    )


def in_numpy(weights: DecoderWeights) -> DecoderWeights:
    """The weights as arrays of NumPy in the same memory."""
    return filled(weights, map(np.asarray, arrays_of(weights)))  # type: ignore[arg-type]


class NumpyOps(PlainOps):
    """`Ops` on arrays of NumPy; weights are too."""

    on_mlx = False

    def __init__(self) -> None:
        super().__init__()
        # Positions of the present step, and their cosines and sines by rotation.
        self._angles: tuple[Array, dict[object, tuple[Array, Array]]] = None, {}

    def array(self, numbers: np.ndarray) -> Array:
        """See `Ops`."""
        return numbers

    def padded(self, tokens: int) -> int:
        """See `Ops`. Nothing is traced here."""
        return tokens

    def embed(self, tokens: Array, embedding: Linear) -> Array:
        """See `Ops`."""
        return embedding.weight[tokens]

    def norm(self, hidden: Array, norm: Norm) -> Array:
        """See `Ops`."""
        return _normed(hidden, norm.eps) * norm.weight

    def product(self, inputs: Array, *linears: Linear) -> Array:
        """See `Ops`."""
        outputs: list[Array] = []
        for linear in linears:
            if len(inputs) <= _TOKENS_APART_MAX:
                product = (inputs[:, None] @ linear.transposed)[:, 0]
            else:
                product = inputs @ linear.transposed
            product = product if linear.bias is None else product + linear.bias
            outputs.append(product if self.deltas is None else self.deltas.add(product, inputs, linear))
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=-1)

    def mlp(self, inputs: Array, mlp: Gated | Experts, router_inputs: Array = None) -> Array:
        """See `Ops`."""
        gate, up = np.split(self.product(inputs, *mlp.gate_up), 2, axis=-1)
        activated = np.negative(gate)
        np.exp(activated, out=activated)
        activated += 1
        np.divide(gate, activated, out=activated)
        activated *= up
        return self.product(activated, mlp.down)

    def rotate(self, product: Array, heads: HeadShape, positions: Any) -> tuple[Array, ...]:
        """See `Ops`."""
        assert heads.rotation is not None, "plain heads are rotated"
        if isinstance(positions, tuple):
            angles = np.asarray(positions[0]), np.asarray(positions[1])
        else:
            angles = self._cos_sin(heads.rotation, positions)
        return self._turned(product, heads, angles)

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> NumpyAttention:
        """See `Ops`."""
        return NumpyAttention(heads)

    def storage(self) -> NumpyStorage:
        """See `Ops`."""
        return NumpyStorage()

    @staticmethod
    def _turned(product: Array, heads: HeadShape, angles: tuple[Array, Array]) -> tuple[Array, ...]:
        count = heads.heads + heads.key_heads
        every = product.reshape(len(product), count + heads.key_heads, heads.dim)
        rotated, values = every[:, :count], every[:, count:]
        if heads.norms is not None:
            rotated = _normed(rotated, heads.norms.eps) * heads.norms.both
        cos, sin = angles
        dims = 2 * cos.shape[-1]
        first, second = rotated[..., : dims // 2], rotated[..., dims // 2 : dims]
        parts = [first * cos - second * sin, second * cos + first * sin, rotated[..., dims:]]
        rotated = np.concatenate(parts, axis=-1)
        return rotated[:, : heads.heads], rotated[:, heads.heads :], values

    def _cos_sin(self, rotation: RotaryEmbedding, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines [tokens, 1, pairs]."""
        if self._angles[0] is not positions:
            self._angles = positions, {}
        known = self._angles[1]
        key = *rotation[:4], id(rotation.freqs), rotation.factor
        if key not in known:
            if rotation.freqs is None:
                assert rotation.base is not None, "a rotation has a base or frequencies"
                speeds = rotation.base ** (-np.arange(0, rotation.dims, 2) / rotation.dims)
            else:
                speeds = 1 / np.asarray(rotation.freqs, np.float64)
            angles = positions[:, None, None] * (speeds * rotation.scale)
            factor = np.float32(rotation.factor)
            known[key] = (
                np.cos(angles).astype(np.float32) * factor,
                np.sin(angles).astype(np.float32) * factor,
            )
        return known[key]


def _normed(states: Array, eps: float) -> Array:
    mean = np.einsum("...i,...i->...", states, states)[..., None] / np.float32(states.shape[-1])
    return states / np.sqrt(mean + np.float32(eps))
