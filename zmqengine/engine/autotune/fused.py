"""Layers of the most common kind, that of Llama, Mistral and Qwen, with fewer kernels.

Between two products of such a layer stands a norm, or heads are turned by their places. On CUDA either is one kernel,
with the sums and copies around it: the host starts half as many, and it is the host that short steps wait for.

What a layer is made of is told by its members, and how it turns heads by what its own code asks of MLX. That there is
nothing else to it is seen by comparing: each half of a layer here, and in `tuning` what the model says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.autotune import attention
from zmqengine.engine.autotune.attending import Attends, KeyValues, attending, until_it_attends
from zmqengine.engine.autotune.plain import gated, in_parts
from zmqengine.engine.autotune.projections import Member
from zmqengine.engine.autotune.variants import same_but_for_rounding
from zmqengine.engine.cuda import between_products
from zmqengine.engine.cuda.between_products import HeadNorms, Heads, Rotation

log = logging.getLogger("zmqengine.engine")

_MEMBERS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_HEADS = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_FOUR = 4
# What is compared: rows, tokens of each, how far apart they stand; inputs are small beside what is added to them. What
# half precision rounds is a third of the tolerance.
_ROWS = 3
_WIDTH = 2
_APART = 100
_SMALL = 0.01
_TOLERANCE = 0.01

Told = list[tuple[mx.array, Rotation, Any]]
"""What a layer has turned: the result, how, and by which places."""


class Fused:
    """A layer of this kind. Of its product for queries, keys and values come its `heads`; scores are scaled by
    `scale`."""

    def __init__(self, layer: Any, heads: Heads, scale: float) -> None:
        self._layer = layer
        self.heads = heads
        self.scale = scale

    def begin(self, hidden: mx.array, added: mx.array | None) -> tuple[mx.array, mx.array]:
        """The inputs of this layer [rows, width, dim], from what goes on in the one before, and the product that is yet
        to be `added` to it, if any is; and its product for queries, keys and values. Products are as `in_parts` gives
        them."""
        norm = self._layer.input_layernorm
        if added is None:
            normed = norm(hidden)
        else:
            hidden, normed = between_products.add_and_norm(hidden, added, norm.weight, norm.eps)
        return hidden, in_parts(_side_by_side(normed), self._layer.self_attn.q_proj.whole)

    def rest(self, inputs: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """From what came into the layer and what it has attended to, [rows, heads, width, dim]: what goes on, but for
        the last product, and that."""
        hidden, normed = self.after_attention(inputs, attended)
        return hidden, self.mlp(normed)

    def mlp(self, normed: mx.array) -> mx.array:
        """The last product."""
        mlp = self._layer.mlp
        inner = gated(_side_by_side(normed), mlp.gate_proj.whole)
        return in_parts(inner, mlp.down_proj)

    def end(self, inputs: mx.array, attended: mx.array) -> mx.array:
        """All that goes on."""
        hidden, normed = self.after_attention(inputs, attended)
        output: mx.array = hidden + self._layer.mlp(normed)
        return output

    def after_attention(self, inputs: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """What goes on, but for the MLP, and that normed for it."""
        norm = self._layer.post_attention_layernorm
        rows, _, width, _ = attended.shape
        by_token = attended.transpose(0, 2, 1, 3).reshape(rows * width, -1)
        added = in_parts(by_token, self._layer.self_attn.o_proj)
        return between_products.add_and_norm(inputs, added, norm.weight, norm.eps)


def fused(layer: Module) -> Fused | None:
    """`layer` in this way; None if it is of another kind."""
    is_known = set(layer.children()) == set(_MEMBERS) and all(  # type: ignore[no-untyped-call]
        check(layer) for check in (_attends_as_usual, _has_usual_mlp, _has_usual_norms)
    )
    try:
        return _with_heads(layer) if is_known else None
    except Exception as error:  # noqa: BLE001 - whatever its own code raises, it is of another kind
        log.info("a layer is not fused", extra={"reason": str(error)[:200]})
        return None


def agrees(found: Fused, layer: Any) -> bool:
    """Whether what is `fused` of a layer computes what its own code does, each half by itself: in what a model says in
    the end, a factor that is next to 1 would not show."""
    try:
        pairs = list(_halves(found, layer))
        same = [same_but_for_rounding(got, wanted, _TOLERANCE) for got, wanted in pairs]
    except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be used
        log.info("a fused layer does not work", extra={"reason": str(error)[:200]})
        return False
    if not all(same):
        log.info("a fused layer is not the same", extra={"same": same})
    return all(same)


def _halves(found: Fused, layer: Any) -> Iterator[tuple[mx.array, mx.array]]:
    """What a fused layer makes and its own code: queries, keys and values, what its MLP adds, and its output."""
    heads, weight = found.heads, layer.input_layernorm.weight
    inputs = (mx.random.normal((_ROWS, _WIDTH, weight.size)) * _SMALL).astype(weight.dtype)
    attended = mx.random.normal(heads.shapes(_ROWS, _WIDTH)[0]).astype(weight.dtype)
    offset = mx.arange(_ROWS, dtype=mx.int32) * _APART
    modules = attention.attending_modules(layer)
    own = until_it_attends(_call_of(layer), modules, inputs, offset)
    _, product = found.begin(inputs, None)
    yield from zip(heads.turned(product, offset, _WIDTH), own[:3], strict=True)
    _, normed = found.after_attention(inputs, attended)
    added = found.mlp(normed)
    yield (added if added.ndim == 2 else added.sum(axis=0)).reshape(normed.shape), layer.mlp(normed)
    with attending(modules, lambda *given, **options: attended):
        output = _call_of(layer)(inputs, None, KeyValues(offset))
    yield found.end(inputs, attended), output


def _attends_as_usual(layer: Any) -> bool:
    members = layer.self_attn
    names = set(members.children())
    norms = [members[name] for name in _HEAD_NORMS if name in names]
    return (
        names - set(_HEAD_NORMS) == {*_HEADS, "o_proj", "rope"}
        and len({norm.eps for norm in norms}) <= 1
        and len(norms) in (0, 2)
        and all(type(norm) is RMSNorm for norm in norms)
        and all(type(members[name]) is Member for name in _HEADS)
    )


def _has_usual_mlp(layer: Any) -> bool:
    mlp = layer.mlp
    return (
        set(mlp.children()) == {"gate_proj", "up_proj", "down_proj"}
        and type(mlp.gate_proj) is type(mlp.up_proj) is Member
    )


def _has_usual_norms(layer: Any) -> bool:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return all(type(norm) is RMSNorm and norm.weight.size % _FOUR == 0 for norm in norms)


def _with_heads(layer: Any) -> Fused | None:
    """Such a layer, with heads as its own code makes them, if it does so in the usual way; nothing is computed."""
    weight = layer.input_layernorm.weight
    offset = mx.zeros((1,), mx.int32)
    inputs = mx.zeros((1, 1, weight.size), weight.dtype)
    with _rotations() as told:
        attends = until_it_attends(_call_of(layer), attention.attending_modules(layer), inputs, offset)
    rotation = _rotation(attends, told, offset)
    (_, count, _, dim), (_, key_count, *_) = attends.queries.shape, attends.keys.shape
    norms = [layer.self_attn[name] for name in _HEAD_NORMS if name in layer.self_attn]
    if rotation is None or any(norm.weight.shape != (dim,) for norm in norms):
        return None
    head_norms = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
    heads = Heads(count, key_count, dim, weight.dtype, rotation, head_norms)
    return Fused(layer, heads, attends.scale)


def _call_of(layer: Any) -> Callable[[mx.array, None, KeyValues], Any]:
    return lambda inputs, mask, cache: layer(inputs, mask, cache=cache)


@contextmanager
def _rotations() -> Iterator[Told]:
    """What is turned meanwhile."""
    told: Told = []
    rope = mx.fast.rope

    def tell(
        inputs: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: Any,
        scale: float,
        offset: Any,
        freqs: Any = None,
        **other: Any,
    ) -> mx.array:
        result = rope(
            inputs, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **other
        )
        told.append((result, Rotation(dims, traditional, base, scale, freqs), offset))
        return result

    mx.fast.rope = tell  # type: ignore[assignment]
    try:
        yield told
    finally:
        mx.fast.rope = rope


def _rotation(attends: Attends, told: Told, offset: mx.array) -> Rotation | None:
    """How queries and keys are turned, if both are alike and in the way of the kernel."""
    if len(told) != 2 or told[0][0] is not attends.queries or told[1][0] is not attends.keys:
        return None
    (_, one, at), (_, other, other_at) = told
    same = one[:4] == other[:4] and one.freqs is other.freqs and at is offset and other_at is offset
    dim, paired = attends.queries.shape[3], between_products.PAIRED
    fits = not (one.traditional or one.dims % paired or dim % paired or dim > attention.DIM_MAX)
    return one if same and fits and attends.values.shape == attends.keys.shape else None


def _side_by_side(inputs: mx.array) -> mx.array:
    return inputs.reshape(-1, inputs.shape[-1])
