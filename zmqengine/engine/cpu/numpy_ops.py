"""Operations of a decoder layer through NumPy, in float32. Everything is computed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from zmqengine.engine.cpu.numpy_attention import NumpyAttention, NumpyStorage
from zmqengine.engine.cpu.numpy_attention import capped as _capped
from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.layers import Experts, HeadShape, Linear, Norm, RotaryEmbedding, Router
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_recurrence import MlxRecurrence, RecurrentMixer
from zmqengine.engine.models.tree import arrays_of, mapped, parts_of

# NumPy's where `Ops` has MLX's.
Array: TypeAlias = Any

# Up to this many tokens, a product with each takes less time than one with all: 75 MB of weights take 4.1, 6.2, 7.5
# and 9.0 ms for 1 to 4 tokens apart, and 10 to 12 for 1 to 5 together.
_TOKENS_APART_MAX = 4


def supports(weights: DecoderWeights) -> bool:
    """Whether `NumpyOps` computes this model: all weights are in float32."""
    return not any(linear.bits for linear in parts_of(weights, Linear)) and all(
        array.dtype == mx.float32 for array in arrays_of(weights) if mx.issubdtype(array.dtype, mx.floating)
    )


def in_numpy(weights: DecoderWeights) -> DecoderWeights:
    """The weights as arrays of NumPy in the same memory, but for those of recurrences."""
    converted = mapped(weights, mx.array, np.asarray)
    layers = [
        ours if isinstance(layer.mixer, HeadShape) else ours._replace(mixer=layer.mixer)  # type: ignore[attr-defined]
        for ours, layer in zip(converted.layers, weights.layers, strict=True)
    ]
    return converted._replace(layers=tuple(layers))


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
        return np.ascontiguousarray(embedding.weight[tokens])

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

    def product_by_head(self, inputs: Array, linear: Linear) -> Array:
        """See `Ops`."""
        weights: Array = linear.transposed
        return (inputs.swapaxes(0, 1) @ weights).swapaxes(0, 1)

    def concatenate(self, *arrays: Array) -> Array:
        """See `Ops`."""
        return np.concatenate(arrays, axis=-1)

    def gated(self, inputs: Array, gate_up: tuple[Linear, ...], activation: str) -> Array:
        """See `PlainOps`."""
        return self.activate(activation, *np.split(self.product(inputs, *gate_up), 2, axis=-1))

    def activate(self, name: str, gate: Array, by: Array) -> Array:
        """See `Ops`."""
        return _ACTIVATIONS[name](gate, by)

    def cap(self, numbers: Array, cap: float) -> Array:
        """See `Ops`."""
        return _capped(numbers, cap)

    def mixture(self, inputs: Array, logits: Array, experts: Experts) -> Array:
        """See `PlainOps`."""
        chosen, shares = _routed(logits, experts.router)
        outputs, deltas = np.zeros_like(inputs), self.deltas
        for number in np.unique(chosen):
            tokens, places = np.nonzero(chosen == number)
            self.deltas = None if deltas is None else deltas.chosen(tokens)
            gate_up = tuple(_of_expert(linear, number) for linear in experts.gate_up)
            gated = self.gated(inputs[tokens], gate_up, experts.activation)
            found = self.product(gated, _of_expert(experts.down, number))
            # A token chooses an expert once.
            outputs[tokens] += found * shares[tokens, places, None]
        self.deltas = deltas
        return outputs

    def rotate(self, product: Array, heads: HeadShape, positions: Any) -> tuple[Array, ...]:
        """See `Ops`."""
        angles = None
        if isinstance(positions, tuple):
            angles = np.asarray(positions[0]), np.asarray(positions[1])
        elif heads.rotation is not None:
            angles = self._cos_sin(heads.rotation, positions)
        return _turned(product, heads, angles)

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> NumpyAttention:
        """See `Ops`."""
        return NumpyAttention(heads, caches)

    def recurrence(self, mixers: Sequence[RecurrentMixer]) -> NumpyRecurrence:
        """See `Ops`."""
        return NumpyRecurrence(mixers)

    def storage(self) -> NumpyStorage:
        """See `Ops`."""
        return NumpyStorage()

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


class NumpyRecurrence(MlxRecurrence):
    """`SlotRecurrence` by MLX, between products of NumPy."""

    def advance(self, layout: Any, layer: int, product: Array) -> Array:
        """See `SlotRecurrence`."""
        return np.asarray(super().advance(layout, layer, mx.array(product)))


def _turned(product: Array, heads: HeadShape, angles: tuple[Array, Array] | None) -> tuple[Array, ...]:
    """`Ops.rotate` by cosines and sines."""
    count, key_count = heads.heads, heads.key_heads
    if heads.gated:
        queries, rest = np.split(product, [2 * count * heads.dim], axis=-1)
        queries = queries.reshape(len(product), count, 2, heads.dim)[:, :, 0]
        product = np.concatenate([queries.reshape(len(product), -1), rest], axis=-1)
    every = product.reshape(len(product), -1, heads.dim)
    rotated, values = every[:, : count + key_count], every[:, -key_count:]
    if heads.value_eps is not None:
        values = _normed(values, heads.value_eps)
    if heads.norms is not None:
        rotated = _normed(rotated, heads.norms.eps) * heads.norms.both
    if angles is not None:
        rotated = _by_angles(
            rotated, *angles, traditional=heads.rotation is not None and heads.rotation.traditional
        )
    if heads.reads_only:
        return (rotated,)
    keys_values = (rotated[:, count:], values)
    return rotated[:, :count], *keys_values[: 1 if heads.value_dims is not None else 2]


def _by_angles(states: Array, cos: Array, sin: Array, *, traditional: bool) -> Array:
    """The first dimensions of heads, turned: number i with its neighbour if `traditional`, else with i + pairs."""
    dims = 2 * cos.shape[-1]
    if traditional:
        first, second = states[..., 0:dims:2], states[..., 1:dims:2]
        both = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return np.concatenate([both.reshape(*states.shape[:-1], dims), states[..., dims:]], axis=-1)
    first, second = states[..., : dims // 2], states[..., dims // 2 : dims]
    parts = [first * cos - second * sin, second * cos + first * sin, states[..., dims:]]
    return np.concatenate(parts, axis=-1)


def _of_expert(linear: Linear, number: int) -> Linear:
    """The weights of one of the experts."""
    assert linear.transposed is not None, "weights in full width have a view"
    bias = None if linear.bias is None else linear.bias[number]
    # Of all adapters.
    down, up = (None if each is None else each[:, number] for each in (linear.down, linear.up))
    return Linear(linear.weight[number], linear.transposed[number], bias=bias, down=down, up=up)


def _routed(logits: Array, router: Router) -> tuple[Array, Array]:
    """The chosen experts of each token and their shares, both [tokens, chosen]."""
    shares = logits
    if router.shares == "softmax":
        shares = _softmax(logits)
    elif router.shares == "sigmoid":
        shares = 1 / (1 + np.exp(-logits))
    ranked = shares if router.bias is None else shares + router.bias
    if router.groups > 1:
        ranked = _within_groups(ranked, router)
    chosen = np.argpartition(ranked, -router.per_token, axis=-1)[:, -router.per_token :]
    shares = np.take_along_axis(shares, chosen, axis=-1)
    if router.shares == "chosen":
        shares = _softmax(shares)
    if router.normalised:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    scale = router.scale if isinstance(router.scale, float) else router.scale[chosen]
    return chosen, shares * scale


def _within_groups(ranked: Array, router: Router) -> Array:
    """The ranks of experts [tokens, experts], 0 in groups that are not chosen from."""
    apart = ranked.reshape(len(ranked), router.groups, -1)
    best = np.sort(apart, axis=-1)[..., -router.group_best :].sum(axis=-1)
    others = np.argsort(best, axis=-1)[:, : router.groups - router.groups_used, None]
    apart = apart.copy()
    np.put_along_axis(apart, others, 0, axis=1)
    return apart.reshape(ranked.shape)


def _softmax(numbers: Array) -> Array:
    powers = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _silu(gate: Array, by: Array) -> Array:
    made = np.negative(gate)
    np.exp(made, out=made)
    made += 1
    np.divide(gate, made, out=made)
    made *= by
    return made


def _gelu(gate: Array, by: Array) -> Array:
    made = gate * gate
    made *= _GELU_CUBE
    made += _GELU_SCALE
    made *= gate
    np.tanh(made, out=made)
    made += 1
    made *= gate
    made *= by
    made *= np.float32(0.5)
    return made


# tanh(root(2 / pi) (x + 0.044715 x^3))
_GELU_SCALE = np.float32((2 / np.pi) ** 0.5)
_GELU_CUBE = np.float32(0.044715 * (2 / np.pi) ** 0.5)


def _clamped_silu(gate: Array, by: Array) -> Array:
    gate, by = np.minimum(gate, np.float32(7)), np.clip(by, np.float32(-7), np.float32(7))
    return (by + 1) * gate / (1 + np.exp(np.float32(-1.702) * gate))


def _sigmoid(gate: Array, by: Array) -> Array:
    return by / (1 + np.exp(-gate))


_ACTIVATIONS: Mapping[str, Callable[[Array, Array], Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "clamped silu": _clamped_silu,
    "sigmoid": _sigmoid,
}


def _normed(states: Array, eps: float) -> Array:
    mean = np.einsum("...i,...i->...", states, states)[..., None] / np.float32(states.shape[-1])
    return states / np.sqrt(mean + np.float32(eps))
