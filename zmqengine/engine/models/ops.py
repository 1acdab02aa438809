"""Operations of a decoder layer, behind one object that is chosen when the engine opens.

Hidden states are [tokens, dim], whatever the number of rows: only attention distinguishes rows. `PlainOps` runs on
every device, by documented MLX calls; `cuda/cuda_ops.py` has kernels for CUDA, `cpu/numpy_ops.py` NumPy for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu_approx, silu

from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import MlxStorage, SlotStorage
from zmqengine.engine.models.attention import MlxAttention, SlotAttention, capped
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Norm, RotaryEmbedding, Router
from zmqengine.engine.models.slot_recurrence import MlxRecurrence, RecurrentMixer, SlotRecurrence
from zmqengine.engine.models.tree import mapped

Product = Callable[[mx.array, Linear], mx.array]
QKV = tuple[mx.array, ...]
"""Queries, keys and values, or what `Ops.attention` takes in their place."""


# mlx-lm's threshold: for fewer (token, expert) pairs, sorting them costs more than it saves.
_SORTED_MIN = 64
# Numbers of rows at which products with quantised weights are measured; others use the variant of the next larger.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)


class AddedProducts(Protocol):
    """The products that adapters add to those of a step."""

    @property
    def looked_up(self) -> Any:
        """The number of each token's adapter, 0 for none, as `by_look_up` takes it."""
        ...

    def chosen(self, tokens: Any) -> AddedProducts:
        """The products for some of the tokens, by their indices."""
        ...

    def add(self, outputs: Any, inputs: Any, linear: Linear) -> Any:
        """The outputs of a product with what is added to it."""
        ...


class Ops(Protocol):
    """Operations of a decoder layer on one device: all that a back-end may replace, but for the draw.

    Arrays are MLX's, or those that `array` makes.
    """

    on_mlx: bool
    """Whether arrays are MLX's."""
    deltas: AddedProducts | None
    """What adapters add to the products of the present step."""
    quantised_rows_max: int
    """Maximum rows of MLX's own product with quantised weights; for more they are dequantised."""

    def array(self, numbers: np.ndarray) -> Any:
        """An array for the other methods."""
        ...

    def padded(self, tokens: int) -> int:
        """Tokens that a step of `tokens` is padded to, so that products and buffers have few sizes."""
        ...

    def embed(self, tokens: Any, embedding: Linear) -> Any:
        """Hidden states [tokens, dim] of `tokens` [tokens]."""
        ...

    def norm(self, hidden: Any, norm: Norm) -> Any:
        """RMS norm of `hidden`."""
        ...

    def add_and_norm(
        self, hidden: Any, added: Any, norm: Norm, added_norm: Norm | None = None, scale: Any = None
    ) -> tuple[Any, Any]:
        """The sum of `hidden` and `added`, the latter after a norm of its own if there is one, times `scale` [1], and
        the result after `norm`."""
        ...

    def product(self, inputs: Any, *linears: Linear) -> Any:
        """The outputs of `linears`, concatenated, [tokens, outputs]."""
        ...

    def product_by_head(self, inputs: Any, linear: Linear) -> Any:
        """Outputs [tokens, heads, outputs] of inputs [tokens, heads, inputs], each head's by weights of its own,
        [heads, outputs, inputs]."""
        ...

    def concatenate(self, *arrays: Any) -> Any:
        """The numbers of these arrays behind one another, along their last axis."""
        ...

    def mlp(self, inputs: Any, mlp: Gated | Experts, router_inputs: Any = None) -> Any:
        """The output of an MLP, [tokens, dim]. `router_inputs`: inputs of the router of experts, if not `inputs`."""
        ...

    def activate(self, name: str, gate: Any, by: Any) -> Any:
        """The activation of `gate` times `by`; its names are those of `ACTIVATIONS`."""
        ...

    def cap(self, numbers: Any, cap: float) -> Any:
        """Numbers bounded smoothly by +-`cap`."""
        ...

    def rotate(self, product: Any, heads: HeadShape, positions: Any) -> QKV:
        """Queries, keys and values [tokens, heads, dim] of a layer's joined product, normed where the model does, and
        rotated by `positions` [tokens] (RoPE); or what `attention` takes in their place.

        For tokens with three positions: by cosines and sines [tokens, 1, pairs].
        """
        ...

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> SlotAttention:
        """Attention of these layers; `caches`: the arrays of a slot that each reads, by number."""
        ...

    def attends_beside(self, heads: Sequence[HeadShape]) -> bool:
        """Whether attention of further layers has the same storage as that of the model's layers."""
        ...

    def recurrence(self, mixers: Sequence[RecurrentMixer]) -> SlotRecurrence:
        """Recurrence of these layers."""
        ...

    def storage(self) -> SlotStorage:
        """Arrays of slots for that attention."""
        ...

    # --- kernel variants, for autotune ---

    def variants(self, linear: Linear, rows: int) -> Mapping[str, Product]:
        """Kernel variants of the product for `rows` rows, by name. The first is the reference; others may be faster."""
        ...

    def unmeasured(self, linear: Linear, rows: int) -> str:
        """The default variant, for a product that is not measured."""
        ...

    def measured_rows(self, linear: Linear) -> Sequence[int]:
        """Numbers of rows at which variants are measured; empty where there is only one."""
        ...

    def loss_max(self, linear: Linear, rows: int) -> float:
        """The factor by which a variant may be slower than the first and still be chosen; 1 for none."""
        ...

    def choose(self, linear: Linear, names: Mapping[int, str]) -> None:
        """Set the variants of all products of this shape, by number of rows."""
        ...


class PlainOps:
    """`Ops` by documented MLX calls.

    Above `quantised_rows_max` rows, quantised weights are dequantised before a product: MLX would compile a kernel
    first. `attention_is_fused`: as in `MlxAttention`.
    """

    on_mlx = True
    deltas: AddedProducts | None = None

    def __init__(self, quantised_rows_max: int = 1 << 30, *, attention_is_fused: bool = True) -> None:
        self.quantised_rows_max = quantised_rows_max
        self._attention_is_fused = attention_is_fused
        self._chosen: dict[object, list[tuple[int, str]]] = {}

    def array(self, numbers: np.ndarray) -> mx.array:
        """See `Ops`."""
        return mx.array(numbers)

    def padded(self, tokens: int) -> int:
        """See `Ops`. One of four sizes between two powers of two: traces and buffers have few shapes."""
        return few_sizes(tokens)

    def embed(self, tokens: mx.array, embedding: Linear) -> mx.array:
        """See `Ops`."""
        if not embedding.bits:
            return embedding.weight[tokens]
        assert embedding.scales is not None, "quantised weights have scales"
        biases = None if embedding.biases is None else embedding.biases[tokens]
        rows = embedding._replace(
            weight=embedding.weight[tokens], scales=embedding.scales[tokens], biases=biases
        )
        return dequantised(rows)

    def norm(self, hidden: mx.array, norm: Norm) -> mx.array:
        """See `Ops`."""
        return mx.fast.rms_norm(hidden, norm.weight, norm.eps)

    def add_and_norm(
        self,
        hidden: mx.array,
        added: mx.array,
        norm: Norm,
        added_norm: Norm | None = None,
        scale: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """See `Ops`."""
        total = hidden + (added if added_norm is None else self.norm(added, added_norm))
        total = total if scale is None else total * scale
        return total, self.norm(total, norm)

    def product(self, inputs: mx.array, *linears: Linear) -> mx.array:
        """See `Ops`."""
        found = [self._variant(linear, inputs.shape[0])(inputs, linear) for linear in linears]
        if self.deltas is not None:
            found = [
                self.deltas.add(outputs, inputs, linear)
                for outputs, linear in zip(found, linears, strict=True)
            ]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)

    def product_by_head(self, inputs: mx.array, linear: Linear) -> mx.array:
        """See `Ops`."""
        by_head = inputs.swapaxes(0, 1)
        if linear.bits and len(inputs) <= self.quantised_rows_max:
            return quantised_product(by_head, linear).swapaxes(0, 1)
        weights = linear.transposed
        if weights is None:
            weights = dequantised(linear).astype(inputs.dtype).swapaxes(-1, -2)
        return (by_head @ weights).swapaxes(0, 1)

    def concatenate(self, *arrays: mx.array) -> mx.array:
        """See `Ops`."""
        return mx.concatenate(list(arrays), axis=-1)

    def mlp(self, inputs: mx.array, mlp: Gated | Experts, router_inputs: mx.array | None = None) -> mx.array:
        """See `Ops`."""
        if isinstance(mlp, Gated):
            return self.product(self.gated(inputs, mlp.gate_up, mlp.activation), mlp.down)
        logits = self.product(inputs if router_inputs is None else router_inputs, mlp.router.linear)
        outputs = self.mixture(inputs, logits, mlp)
        if mlp.shared is None:
            return outputs
        shared = self.mlp(inputs, mlp.shared)
        if mlp.shared_gate is not None:
            shared = self.activate("sigmoid", self.product(inputs, mlp.shared_gate), shared)
        return outputs + shared

    def gated(self, inputs: mx.array, gate_up: tuple[Linear, ...], activation: str) -> mx.array:
        """The activation of the first half of the outputs times the other half."""
        return self.activate(activation, *mx.split(self.product(inputs, *gate_up), 2, axis=-1))

    def activate(self, name: str, gate: mx.array, by: mx.array) -> mx.array:
        """See `Ops`."""
        return ACTIVATIONS[name](gate, by)

    def cap(self, numbers: mx.array, cap: float) -> mx.array:
        """See `Ops`."""
        return capped(numbers, cap)

    def rotate(self, product: mx.array, heads: HeadShape, positions: Any) -> QKV:
        """See `Ops`."""
        rotated, values = _normed_heads(product, heads)
        if isinstance(positions, tuple):
            rotated = turned(rotated, positions)
        elif heads.rotation is not None:
            rotated = _rotated(rotated, heads.rotation, positions)
        if heads.reads_only:
            return (rotated,)
        queries, keys = rotated[:, : heads.heads], rotated[:, heads.heads :]
        return (queries, keys) if values is None else (queries, keys, values)

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> SlotAttention:
        """See `Ops`."""
        return MlxAttention(heads, caches, is_fused=self._attention_is_fused)

    def attends_beside(self, heads: Sequence[HeadShape]) -> bool:
        """See `Ops`."""
        return True

    def recurrence(self, mixers: Sequence[RecurrentMixer]) -> SlotRecurrence:
        """See `Ops`."""
        return MlxRecurrence(mixers)

    def storage(self) -> SlotStorage:
        """See `Ops`."""
        return MlxStorage()

    def variants(self, linear: Linear, rows: int) -> Mapping[str, Product]:
        """See `Ops`."""
        if not linear.bits:
            return {"product": product}
        found = {"dequantised": multiply_dequantised}
        if rows <= self.quantised_rows_max:
            found = {"product": quantised_product, **found}
        return found

    def unmeasured(self, linear: Linear, rows: int) -> str:
        """See `Ops`."""
        return next(iter(self.variants(linear, rows)))

    def measured_rows(self, linear: Linear) -> Sequence[int]:
        """See `Ops`."""
        # Scales of other modes do not have the activations' type.
        return _ROWS if linear.mode == "affine" else ()

    def loss_max(self, linear: Linear, rows: int) -> float:
        """See `Ops`."""
        return 1.0

    def choose(self, linear: Linear, names: Mapping[int, str]) -> None:
        """See `Ops`."""
        self._chosen[shape_of(linear)] = sorted(names.items())

    def _variant(self, linear: Linear, rows: int) -> Product:
        """The variant for a number of rows: that of the next larger measured number, or of the largest."""
        names = self._chosen.get(shape_of(linear))
        if names is None:
            measured, name = rows, self.unmeasured(linear, rows)
        else:
            measured, name = next((pair for pair in names if rows <= pair[0]), names[-1])
        return self.variants(linear, measured)[name]

    def mixture(self, inputs: mx.array, logits: mx.array, experts: Experts) -> mx.array:
        """The sum [tokens, dim] of the outputs of experts, chosen and weighted by the router's `logits`."""
        chosen, shares = routed(logits, experts.router)
        adapters = None if self.deltas is None else self.deltas.looked_up
        outputs = _each_expert(inputs, chosen, experts, adapters)
        return (outputs * shares[..., None]).sum(axis=-2).astype(outputs.dtype)


def routed(logits: mx.array, router: Router) -> tuple[mx.array, mx.array]:
    """The chosen experts of each token and their shares, both [tokens, chosen]."""
    count = router.per_token
    shares = logits
    if router.shares == "softmax":
        shares = mx.softmax(logits, axis=-1, precise=True)
    elif router.shares == "sigmoid":
        shares = mx.sigmoid(logits.astype(mx.float32))
    ranked = shares if router.bias is None else shares + router.bias
    if router.groups > 1:
        ranked = _within_groups(ranked, router)
    chosen = mx.argpartition(ranked, kth=-count, axis=-1)[..., -count:]
    shares = mx.take_along_axis(shares, chosen, axis=-1)
    if router.shares == "chosen":
        shares = mx.softmax(shares, axis=-1, precise=True)
    if router.normalised:
        shares = shares / mx.sum(shares, axis=-1, keepdims=True)
    if isinstance(router.scale, mx.array):
        return chosen, shares * router.scale[chosen]
    return chosen, shares if router.scale == 1.0 else shares * router.scale


def _within_groups(ranked: mx.array, router: Router) -> mx.array:
    """The ranks of experts [tokens, experts], 0 in groups that are not chosen from."""
    apart = mx.unflatten(ranked, -1, (router.groups, -1))
    best = mx.topk(apart, router.group_best, axis=-1).sum(axis=-1, keepdims=True)
    unused = router.groups - router.groups_used
    others = mx.argpartition(best, kth=unused - 1, axis=-2)[..., :unused, :]
    return mx.put_along_axis(apart, others, mx.array(0, ranked.dtype), axis=-2).flatten(-2, -1)


def _rotated(heads: mx.array, rotation: RotaryEmbedding, positions: mx.array) -> mx.array:
    """Heads [tokens, heads, dim] rotated by `positions` [tokens]."""
    if rotation.factor != 1.0:
        heads = heads.at[..., : rotation.dims].multiply(rotation.factor)
    # To MLX's rotation each token is a row of one token, at a position of its own.
    return mx.fast.rope(
        heads[:, :, None],
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=rotation.scale,
        offset=positions,
        freqs=rotation.freqs,
    )[:, :, 0]


def turned(states: mx.array, angles: tuple[mx.array, mx.array]) -> mx.array:
    """Heads [..., dim] turned by cosines and sines [..., pairs], which broadcast, in float32: of the first 2 pairs
    dimensions number i with i + pairs."""
    cos, sin = angles
    dims = 2 * cos.shape[-1]
    first, second = mx.split(states[..., :dims].astype(mx.float32), 2, axis=-1)
    made = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    made = made.astype(states.dtype)
    return made if dims == states.shape[-1] else mx.concatenate([made, states[..., dims:]], axis=-1)


def _normed_heads(product: mx.array, heads: HeadShape) -> tuple[mx.array, mx.array | None]:
    """Queries and keys together, normed where the model does, and values: [tokens, heads, dim]."""
    tokens, count, key_count = product.shape[0], heads.heads, heads.key_heads
    if heads.gated:
        queries, rest = mx.split(product, [2 * count * heads.dim], axis=-1)
        queries = queries.reshape(tokens, count, 2, heads.dim)[:, :, 0].reshape(tokens, -1)
        product = mx.concatenate([queries, rest], axis=-1)
    every = product.reshape(tokens, -1, heads.dim)
    rotated = every[:, : count + key_count]
    values: mx.array | None = None
    if not heads.reads_only and heads.value_dims is None:
        values = every[:, -key_count:]
        if heads.value_eps is not None:
            values = mx.fast.rms_norm(values, None, heads.value_eps)
    if heads.norms is not None:
        rotated = mx.fast.rms_norm(rotated, None, heads.norms.eps) * heads.norms.both
    return rotated, values


def gate_of(product: Any, heads: HeadShape) -> Any:
    """The gate [tokens, heads * dim] of a joined product with `gated` heads."""
    tokens, width = product.shape[0], heads.heads * heads.dim
    return product[:, : 2 * width].reshape(tokens, heads.heads, 2, heads.dim)[:, :, 1].reshape(tokens, width)


def shape_of(linear: Linear) -> object:
    """The shape of a product, by which a variant is chosen: everything but the values of its weights."""
    packing = linear.bits, linear.group_size, linear.mode
    return linear.inputs, linear.outputs, packing, linear.dtype, linear.bias is None


def product(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with weights that are not quantised."""
    weights = linear.transposed
    assert weights is not None, "weights in full width have a view"
    return inputs @ weights if linear.bias is None else mx.addmm(linear.bias, inputs, weights)


def factor_type(dtype: mx.Dtype) -> mx.Dtype:
    """The type of adapters' factors for weights of this one: on a CPU gathered products are of float32 alone."""
    return mx.float32 if mx.default_device() == mx.cpu else dtype


def by_look_up(inputs: mx.array, linear: Linear, numbers: mx.array) -> mx.array:
    """The product that the adapter of each token adds, by its number."""
    assert linear.down is not None, "a product without factors is not adapted"
    assert linear.up is not None, "factors come in pairs"
    narrow = mx.gather_mm(inputs.astype(linear.down.dtype)[:, None], linear.down, rhs_indices=numbers)
    return mx.gather_mm(narrow, linear.up, rhs_indices=numbers)[:, 0].astype(inputs.dtype)


def experts_by_look_up(inputs: mx.array, linear: Linear, chosen: mx.array, numbers: mx.array) -> mx.array:
    """The product that the adapter of each token adds to that of an expert, by the numbers of both."""
    assert linear.down is not None, "a product without factors is not adapted"
    assert linear.up is not None, "factors come in pairs"
    both = numbers * linear.down.shape[1] + chosen.astype(numbers.dtype)
    narrow = mx.gather_mm(inputs.astype(linear.down.dtype), linear.down.flatten(0, 1), rhs_indices=both)
    return mx.gather_mm(narrow, linear.up.flatten(0, 1), rhs_indices=both).astype(inputs.dtype)


def quantised_product(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights, by MLX."""
    assert linear.scales is not None, "quantised weights have scales"
    found = mx.quantized_matmul(
        inputs,
        linear.weight,
        scales=linear.scales,
        biases=linear.biases,
        transpose=True,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )
    return found if linear.bias is None else found + linear.bias


def multiply_dequantised(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights, dequantised for this call."""
    return product(inputs, linear._replace(transposed=dequantised(linear).astype(inputs.dtype).T))


def dequantised(linear: Linear) -> mx.array:
    """Dequantised weights."""
    assert linear.scales is not None, "quantised weights have scales"
    return mx.dequantize(
        linear.weight,
        linear.scales,
        linear.biases,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    )


@partial(mx.compile, shapeless=True)
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up"""
    outputs: mx.array = silu(gate) * up
    return outputs


@partial(mx.compile, shapeless=True)
def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up, by the approximation with tanh."""
    outputs: mx.array = gelu_approx(gate) * up
    return outputs


@partial(mx.compile, shapeless=True)
def clamped_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(1.702 gate) * (up + 1), both bounded by 7: gpt_oss's."""
    gate, up = mx.minimum(gate, 7.0), mx.clip(up, -7.0, 7.0)
    outputs: mx.array = (up + 1.0) * (gate * mx.sigmoid(1.702 * gate))
    return outputs


def _sigmoid(gate: mx.array, by: mx.array) -> mx.array:
    return mx.sigmoid(gate) * by


ACTIVATIONS: Mapping[str, Callable[[mx.array, mx.array], mx.array]] = {
    "silu": swiglu,
    "gelu": geglu,
    "clamped silu": clamped_swiglu,
    "sigmoid": _sigmoid,
}
"""Activations of gates by name, times what passes them."""


def _each_expert(
    inputs: mx.array, chosen: mx.array, experts: Experts, adapters: mx.array | None = None
) -> mx.array:
    """The outputs [tokens, chosen, dim] of the `chosen` experts of each token, before the router's weights.

    `adapters` [tokens]: the number of each token's adapter.
    """
    tokens, count = chosen.shape
    order = None
    by_token = inputs[:, None, None]
    adapters = None if adapters is None else adapters[:, None]
    if is_sorted := tokens * count >= _SORTED_MIN:
        # Sorted by expert, so that tokens of one expert are adjacent.
        flat = chosen.reshape(-1)
        order = mx.argsort(flat)
        # The axis is inserted before the look-up: a view with one behind it is read wrongly by MLX's products of sorted
        # rows (github.com/ml-explore/mlx/issues/4253).
        by_token, chosen = inputs[:, None][order // count], flat[order]
        adapters = None if adapters is None else adapters[:, 0][order // count]
    parts = [
        _of_experts(by_token, linear, chosen, adapters, is_sorted=is_sorted) for linear in experts.gate_up
    ]
    gate, up = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
    gated = ACTIVATIONS[experts.activation](gate, up)
    found = _of_experts(gated, experts.down, chosen, adapters, is_sorted=is_sorted)
    if order is not None:
        found = found[mx.argsort(order)].reshape(tokens, count, 1, -1)
    return found.squeeze(-2)


_GATHERS: dict[object, bool] = {}
"""Whether MLX multiplies by chosen ones of quantised weights, by their shape."""


def _gathers(linear: Linear, dtype: mx.Dtype) -> bool:
    """Whether MLX multiplies `dtype` by chosen ones of these quantised weights: on CUDA it does not for every shape.

    One product is tried, since MLX says so only when it computes.
    """
    key = shape_of(linear), dtype
    if key not in _GATHERS:
        one = mapped(linear, mx.array, lambda array: mx.zeros((1, *array.shape[1:]), array.dtype))
        inputs, chosen = mx.zeros((1, 1, 1, linear.inputs), dtype), mx.zeros((1, 1), mx.uint32)
        try:
            mx.eval(_gathered(inputs, one, chosen, is_sorted=False))
            _GATHERS[key] = True
        except RuntimeError:
            _GATHERS[key] = False
    return _GATHERS[key]


def _gathered(inputs: mx.array, linear: Linear, chosen: mx.array, *, is_sorted: bool) -> mx.array:
    assert linear.scales is not None, "quantised weights have scales"
    return mx.gather_qmm(
        inputs,
        linear.weight,
        linear.scales,
        linear.biases,
        rhs_indices=chosen,
        transpose=True,
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
        sorted_indices=is_sorted,
    )


def _of_experts(
    inputs: mx.array, linear: Linear, chosen: mx.array, adapters: mx.array | None, *, is_sorted: bool
) -> mx.array:
    if linear.bits and _gathers(linear, inputs.dtype):
        found = _gathered(inputs, linear, chosen, is_sorted=is_sorted)
    else:
        weights = linear.transposed
        if weights is None:
            weights = dequantised(linear).astype(inputs.dtype).swapaxes(-1, -2)
        found = mx.gather_mm(inputs, weights, rhs_indices=chosen, sorted_indices=is_sorted)
    if adapters is not None and linear.down is not None:
        found = found + experts_by_look_up(inputs, linear, chosen, adapters)
    return found if linear.bias is None else found + linear.bias[chosen][..., None, :]
