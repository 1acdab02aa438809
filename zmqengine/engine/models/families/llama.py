"""Llama, Mistral, MiMo, Qwen2, Qwen3 and Qwen3-MoE: a norm before attention, a norm before the MLP."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.models.architecture import Before, DecoderWeights, Mixer, Stream
from zmqengine.engine.models.families.heads import HeadForm
from zmqengine.engine.models.families.reading import (
    expect_attention,
    expect_experts,
    expect_parts,
    expect_products,
    gated_of,
    linear_of,
    norm_of,
    qkv_of,
    query_key_names,
    query_key_norms,
    read_alike,
    rotation_of,
)
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Norm, Router
from zmqengine.engine.models.ops import Ops

# Modules of mlx-lm. It loads Mistral as a Llama.
MODULES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mimo")


class LlamaLayer(NamedTuple):
    """A decoder layer. `inputs`: the product of queries, keys and values, or three of them, or that of a recurrence."""

    input_norm: Norm
    inputs: tuple[Linear, ...]
    mixer: Mixer
    out: Linear
    mlp_norm: Norm
    mlp: Gated | Experts

    def before(self, ops: Ops, stream: Stream, positions: Any) -> Before:
        """See `DecoderLayer`."""
        hidden, normed = stream.summed(ops, self.input_norm)
        product = ops.product(normed, *self.inputs)
        if isinstance(self.mixer, HeadShape):
            return Before(hidden, ops.rotate(product, self.mixer, positions))
        return Before(hidden, (product,))

    def after(self, ops: Ops, before: Before, mixed: Any, beside: tuple[Any, ...]) -> Stream:
        """See `DecoderLayer`."""
        attended = ops.product(mixed, self.out)
        hidden, normed = ops.add_and_norm(before.hidden, attended, self.mlp_norm)
        return Stream(hidden, ops.mlp(normed, self.mlp))


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    layer = partial(_layer, window=getattr(model.model, "sliding_window", None))
    return read_alike(model, _check, layer, is_tied=model.args.tie_word_embeddings)


def read_layer(layer: Any) -> LlamaLayer:
    """The weights of a layer alone. Raises Unsupported."""
    _check(layer)
    return _layer(layer)


def _check(layer: Any) -> None:
    expect_parts(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    attention, mlp = layer.self_attn, layer.mlp
    expect_attention(attention, *query_key_names(attention))
    rotation_of(attention.rope)
    if "switch_mlp" in mlp:
        expect_products(mlp.gate)
        mlp = expect_experts(mlp)
    expect_parts(mlp, "gate_proj", "up_proj", "down_proj", optional=["activation"])
    expect_products(mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _layer(layer: Any, window: int | None = None) -> LlamaLayer:
    attention = layer.self_attn
    window = window if getattr(layer, "use_sliding", False) else None
    return LlamaLayer(
        norm_of(layer.input_layernorm),
        qkv_of(attention),
        heads_of(attention, layer.input_layernorm.weight.dtype, window),
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        _experts(layer.mlp) if "switch_mlp" in layer.mlp else gated_of(layer.mlp),
    )


def heads_of(attention: Any, dtype: mx.Dtype, window: int | None = None) -> HeadShape:
    """The shape of one of mlx-lm's modules of attention."""
    heads, key_heads = attention.n_heads, attention.n_kv_heads
    norms = None
    if "q_norm" in attention:
        norms = query_key_norms(norm_of(attention.q_norm), norm_of(attention.k_norm), heads, key_heads)
    dim = linear_of(attention.q_proj).outputs // heads
    return HeadShape(
        heads, key_heads, dim, attention.scale, rotation_of(attention.rope), norms, window, dtype
    )


def _experts(mlp: Any) -> Experts:
    gated = gated_of(mlp.switch_mlp)
    router = Router(linear_of(mlp.gate), mlp.top_k, normalised=mlp.norm_topk_prob)
    return Experts(router, gated.gate_up, gated.down)


MIMO_HEAD = HeadForm(
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    read_layer,
    hidden_first=True,
    numbered=False,
)
