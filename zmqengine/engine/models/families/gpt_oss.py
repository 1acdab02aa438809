"""gpt_oss: Llama's layers with sinks, windows of every second layer, and experts with biases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.families.reading import (
    expect_parts,
    expect_products,
    gated_of,
    joined,
    linear_of,
    norm_of,
    rotation_of,
)
from zmqengine.engine.models.layers import Experts, HeadShape, Router

MODULES = ("gpt_oss",)


def read(model: Any, *, in_columns: bool = False) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    inner = model.model
    expect_parts(model, "model", "lm_head")
    expect_parts(inner, "embed_tokens", "layers", "norm")
    for layer in inner.layers:
        attention, experts = layer.self_attn, layer.mlp.experts
        expect_parts(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        expect_parts(attention, "q_proj", "k_proj", "v_proj", "o_proj", "rope", "sinks")
        expect_parts(layer.mlp, "experts", "router")
        expect_parts(experts, "gate_proj", "up_proj", "down_proj", optional=["activation"])
        expect_products(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        expect_products(layer.mlp.router, experts.gate_proj, experts.up_proj, experts.down_proj)
    layers = tuple(
        _layer(layer, inner.window_size if kind == "sliding_attention" else None)
        for layer, kind in zip(inner.layers, inner.layer_types, strict=True)
    )
    return DecoderWeights(
        linear_of(inner.embed_tokens), layers, norm_of(inner.norm), linear_of(model.lm_head)
    )


def _layer(layer: Any, window: int | None) -> LlamaLayer:
    attention, mlp = layer.self_attn, layer.mlp
    dtype: mx.Dtype = layer.input_layernorm.weight.dtype
    mixer = HeadShape(
        attention.num_attention_heads,
        attention.num_key_value_heads,
        attention.head_dim,
        attention.sm_scale,
        rotation_of(attention.rope),
        None,
        window,
        dtype,
        sinks=attention.sinks.astype(dtype),
    )
    gated = gated_of(mlp.experts)
    router = Router(linear_of(mlp.router), mlp.num_experts_per_tok, "chosen")
    return LlamaLayer(
        norm_of(layer.input_layernorm),
        joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        mixer,
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        Experts(router, gated.gate_up, gated.down, "clamped silu"),
    )
