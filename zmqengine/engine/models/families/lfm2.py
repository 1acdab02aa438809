"""LFM2 and its mixture: Llama's layers, most of them with a short convolution in place of attention."""

from __future__ import annotations

from typing import Any

from zmqengine.engine.models.architecture import DecoderWeights, Mixer
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.families.reading import (
    expect_attention,
    expect_parts,
    expect_products,
    gated_of,
    joined,
    linear_of,
    norm_of,
    qkv_of,
    query_key_norms,
    rotation_of,
)
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Router
from zmqengine.engine.models.recurrence import ShortConvolution

MODULES = ("lfm2", "lfm2_moe")


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    inner = model.model
    expect_parts(model, "model")
    expect_parts(inner, "embed_tokens", "layers", "embedding_norm")
    for layer in inner.layers:
        _check(layer)
    layers = tuple(map(_layer, inner.layers))
    embedding = linear_of(inner.embed_tokens)
    return DecoderWeights(embedding, layers, norm_of(inner.embedding_norm), embedding)


def _check(layer: Any) -> None:
    mixer = "self_attn" if layer.is_attention_layer else "conv"
    expect_parts(layer, mixer, "feed_forward", "operator_norm", "ffn_norm")
    if layer.is_attention_layer:
        expect_attention(layer.self_attn, "q_layernorm", "k_layernorm", out="out_proj")
    else:
        expect_parts(layer.conv, "conv", "in_proj", "out_proj")
        expect_products(layer.conv.in_proj, layer.conv.out_proj)


def _layer(layer: Any) -> LlamaLayer:
    inputs: tuple[Linear, ...]
    mixer: Mixer
    if layer.is_attention_layer:
        attention, dtype = layer.self_attn, layer.operator_norm.weight.dtype
        heads, key_heads, dim = attention.n_heads, attention.n_kv_heads, attention.head_dim
        norms = query_key_norms(
            norm_of(attention.q_layernorm), norm_of(attention.k_layernorm), heads, key_heads
        )
        inputs, out = qkv_of(attention), attention.out_proj
        rotation = rotation_of(attention.rope)
        mixer = HeadShape(heads, key_heads, dim, attention.scale, rotation, norms, None, dtype)
    else:
        conv = layer.conv
        inputs, out = (linear_of(conv.in_proj),), conv.out_proj
        mixer = ShortConvolution(conv.conv.weight[:, :, 0], conv.conv.get("bias"))
    return LlamaLayer(
        norm_of(layer.operator_norm),
        inputs,
        mixer,
        linear_of(out),
        norm_of(layer.ffn_norm),
        _mlp(layer.feed_forward),
    )


def _mlp(mlp: Any) -> Gated | Experts:
    if "w1" in mlp:
        expect_parts(mlp, "w1", "w2", "w3")
        return Gated(joined([mlp.w1, mlp.w3]), linear_of(mlp.w2))
    if "switch_mlp" not in mlp:
        return gated_of(mlp)
    gated = gated_of(mlp.switch_mlp)
    router = Router(
        linear_of(mlp.gate),
        mlp.top_k,
        "sigmoid",
        normalised=mlp.norm_topk_prob,
        bias=mlp.get("expert_bias"),
        scale=float(mlp.routed_scaling_factor),
    )
    return Experts(router, gated.gate_up, gated.down)
