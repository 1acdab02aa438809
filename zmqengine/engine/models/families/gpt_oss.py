"""gpt_oss: Llama's layers with sinks, windows of every second layer, and experts with biases."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.families.llama import LlamaLayer
from zmqengine.engine.models.families.reading import (
    expect_attention,
    expect_parts,
    expect_products,
    gated_of,
    head_of,
    linear_of,
    norm_of,
    qkv_of,
    rotation_of,
    weights_of,
)
from zmqengine.engine.models.layers import Experts, HeadShape, Router

MODULES = ("gpt_oss",)


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    inner, head = model.model, head_of(model)
    for layer in inner.layers:
        experts = layer.mlp.experts
        expect_parts(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
        expect_attention(layer.self_attn, others=["sinks"])
        expect_parts(layer.mlp, "experts", "router")
        expect_parts(experts, "gate_proj", "up_proj", "down_proj", optional=["activation"])
        expect_products(layer.mlp.router, experts.gate_proj, experts.up_proj, experts.down_proj)
    layers = [
        _layer(layer, inner.window_size if kind == "sliding_attention" else None)
        for layer, kind in zip(inner.layers, inner.layer_types, strict=True)
    ]
    return weights_of(model, layers, head)


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
        qkv_of(attention),
        mixer,
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        Experts(router, gated.gate_up, gated.down, "clamped silu"),
    )
