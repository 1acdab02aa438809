"""GLM-4.x mixtures: Llama's layers with experts chosen by sigmoids, and one that takes every token."""

from __future__ import annotations

from typing import Any

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.families.heads import HeadForm
from zmqengine.engine.models.families.llama import LlamaLayer, heads_of
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
    read_alike,
    with_view,
)
from zmqengine.engine.models.layers import Experts, Gated, Linear, Router

MODULES = ("glm4_moe",)


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    return read_alike(model, _check, _layer)


def read_layer(layer: Any) -> LlamaLayer:
    """The weights of a layer alone. Raises Unsupported."""
    _check(layer)
    return _layer(layer)


def _check(layer: Any) -> None:
    expect_parts(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    expect_attention(layer.self_attn, *query_key_names(layer.self_attn))
    check_mlp(layer.mlp)


def check_mlp(mlp: Any) -> None:
    """Raise Unsupported unless an MLP, or a mixture, has the parts that are read."""
    if "switch_mlp" in mlp:
        mlp = expect_experts(mlp, optional=["shared_experts"])
    expect_products(mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _layer(layer: Any) -> LlamaLayer:
    attention = layer.self_attn
    return LlamaLayer(
        norm_of(layer.input_layernorm),
        qkv_of(attention),
        heads_of(attention, layer.input_layernorm.weight.dtype),
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        experts_of(layer.mlp) if "switch_mlp" in layer.mlp else gated_of(layer.mlp),
    )


def experts_of(mlp: Any) -> Experts:
    """A mixture whose router chooses by sigmoids with a bias."""
    gate = mlp.gate
    router = Router(
        with_view(Linear(gate.weight)),
        gate.top_k,
        "sigmoid",
        normalised=gate.norm_topk_prob and gate.top_k > 1,
        bias=gate.e_score_correction_bias,
        scale=float(gate.routed_scaling_factor),
        groups=gate.n_group,
        groups_used=gate.topk_group,
    )
    return mixture_of(mlp, router)


def mixture_of(mlp: Any, router: Router) -> Experts:
    """The experts behind a router, and the one that takes every token, if there is one."""
    gated = gated_of(mlp.switch_mlp)
    shared: Gated | None = gated_of(mlp.shared_experts) if "shared_experts" in mlp else None
    return Experts(router, gated.gate_up, gated.down, shared=shared)


HEAD = HeadForm(
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    read_layer,
    shared=("embed_tokens.", "shared_head.head."),
)
