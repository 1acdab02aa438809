"""Layers of the most common kind, that of Llama, Mistral and Qwen, with fewer kernels.

Between two products of such a layer stands a norm, or heads are turned by their places. On CUDA either is one kernel,
with the sums and copies around it: the host starts half as many, and it is the host that short steps wait for.

What a layer is made of is told by its members, and how it turns heads by what its own code asks of MLX. That there is
nothing else to it is not told here: `tuning` compares what the model says with what it said before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.device.plain import in_parts
from zmqengine.engine.device.projections import Member
from zmqengine.engine.kernels import between_products
from zmqengine.engine.kernels.between_products import HeadNorms, Rotation

_MEMBERS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_HEADS = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_FOUR = 4

Told = list[tuple[mx.array, Rotation, Any]]
"""What a layer has turned: the result, how, and by which places."""


class Fused:
    """A layer of this kind."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def heads(
        self,
        normed: mx.array,
        own: tuple[mx.array, mx.array, mx.array],
        told: Told,
        offset: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of a step, of its `normed` inputs [rows, width, dim]; from what the layer's `own`
        code makes, which is not computed, comes how they are to look. Raises TypeError if they are of another kind."""
        queries, keys, _ = own
        rotation = _rotation(own, told, offset)
        product = in_parts(_side_by_side(normed), _whole(self._layer.self_attn, _HEADS))
        shapes = tuple(queries.shape), tuple(keys.shape)
        return between_products.turned_heads(
            product, offset, shapes, normed.dtype, rotation, self._head_norms(queries.shape[3])
        )

    def begin(self, hidden: mx.array, added: mx.array | None) -> tuple[mx.array, mx.array]:
        """The inputs of this layer, and those normed: from what goes on in the one before, and the product that is yet
        to be `added` to it, as `in_parts` gives it."""
        norm = self._layer.input_layernorm
        if added is None:
            return hidden, norm(hidden)
        return between_products.add_and_norm(hidden, added, norm.weight, norm.eps)

    def rest(self, inputs: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        """From what came into the layer [rows, width, dim] and what it has attended to: what goes on, but for the last
        product, and that product as `in_parts` gives it."""
        hidden, normed = self._after_attention(inputs, attended)
        mlp = self._layer.mlp
        gate, up = mx.split(_whole(mlp, ("gate_proj", "up_proj"))(_side_by_side(normed)), 2, axis=-1)
        return hidden, in_parts(silu(gate) * up, mlp.down_proj)

    def end(self, inputs: mx.array, attended: mx.array) -> mx.array:
        """All that goes on."""
        hidden, normed = self._after_attention(inputs, attended)
        output: mx.array = hidden + self._layer.mlp(normed)
        return output

    def _after_attention(self, inputs: mx.array, attended: mx.array) -> tuple[mx.array, mx.array]:
        norm = self._layer.post_attention_layernorm
        rows, _, width, _ = attended.shape
        by_token = attended.transpose(0, 2, 1, 3).reshape(rows * width, -1)
        added = in_parts(by_token, self._layer.self_attn.o_proj)
        return between_products.add_and_norm(inputs, added, norm.weight, norm.eps)

    def _head_norms(self, dim: int) -> HeadNorms | None:
        norms = [self._layer.self_attn[name] for name in _HEAD_NORMS if name in self._layer.self_attn]
        if not norms:
            return None
        if any(norm.weight.shape != (dim,) or norm.eps != norms[0].eps for norm in norms):
            raise TypeError("a layer that norms its heads in a way of its own")
        return HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)


def fused(layer: Module) -> Fused | None:
    """`layer` in this way; None if it is of another kind."""
    is_known = set(layer.children()) == set(_MEMBERS) and all(  # type: ignore[no-untyped-call]
        check(layer) for check in (_attends_as_usual, _has_usual_mlp, _has_usual_norms)
    )
    return Fused(layer) if is_known else None


def _attends_as_usual(layer: Any) -> bool:
    attention = layer.self_attn
    members = set(attention.children())
    norms = [attention[name] for name in _HEAD_NORMS if name in members]
    return (
        members - set(_HEAD_NORMS) == {*_HEADS, "o_proj", "rope"}
        and len(norms) in (0, 2)
        and all(type(norm) is RMSNorm for norm in norms)
        and all(type(attention[name]) is Member for name in _HEADS)
        and "bias" not in attention.o_proj
    )


def _has_usual_mlp(layer: Any) -> bool:
    mlp = layer.mlp
    return (
        set(mlp.children()) == {"gate_proj", "up_proj", "down_proj"}
        and type(mlp.gate_proj) is type(mlp.up_proj) is Member
        and "bias" not in mlp.down_proj
    )


def _has_usual_norms(layer: Any) -> bool:
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return all(type(norm) is RMSNorm and norm.weight.size % _FOUR == 0 for norm in norms)


@contextmanager
def rotations() -> Iterator[Told]:
    """What layers turn meanwhile."""
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


def _rotation(own: Sequence[mx.array], told: Told, offset: mx.array) -> Rotation:
    """How queries and keys are turned, both alike."""
    queries, keys, values = own
    if len(told) != 2 or told[0][0] is not queries or told[1][0] is not keys:
        raise TypeError("a layer that turns its heads in a way of its own")
    (_, one, at), (_, other, other_at) = told
    same = one[:4] == other[:4] and one.freqs is other.freqs and at is offset and other_at is offset
    dim, paired = queries.shape[3], between_products.PAIRED
    fits = not (one.traditional or one.dims % paired or dim % paired or values.shape != keys.shape)
    if not same or not fits:
        raise TypeError("heads that are turned in a way of their own")
    return one


def _whole(module: Any, names: Sequence[str]) -> Any:
    """The product of all members of a group."""
    return module[names[0]].whole


def _side_by_side(inputs: mx.array) -> mx.array:
    return inputs.reshape(-1, inputs.shape[-1])
