"""Qwen3-Next and Qwen3.5 to 3.8, dense and mixtures: gated delta rule in three of four layers, attention with gates in
the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.architecture import Before, DecoderWeights, Mixer, Stream
from zmqengine.engine.models.families.heads import HeadForm
from zmqengine.engine.models.families.reading import (
    expect_attention,
    expect_experts,
    expect_parts,
    expect_products,
    gated_of,
    joined,
    linear_of,
    norm_of,
    qkv_of,
    query_key_norms,
    read_alike,
    rotation_of,
)
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Norm, Router
from zmqengine.engine.models.ops import Ops, gate_of
from zmqengine.engine.models.recurrence import DeltaShape, DeltaWeights, GatedDelta

MODULES = ("qwen3_5", "qwen3_next")


class QwenNextLayer(NamedTuple):
    """A decoder layer. `order` [outputs]: the outputs of `inputs` as the delta rule takes them, where they differ."""

    input_norm: Norm
    inputs: tuple[Linear, ...]
    order: mx.array | None
    mixer: Mixer
    out: Linear
    mlp_norm: Norm
    mlp: Gated | Experts

    def before(self, ops: Ops, stream: Stream, positions: Any) -> Before:
        """See `DecoderLayer`."""
        hidden, normed = stream.summed(ops, self.input_norm)
        product = ops.product(normed, *self.inputs)
        if isinstance(self.mixer, HeadShape):
            return Before(hidden, ops.rotate(product, self.mixer, positions), (gate_of(product, self.mixer),))
        return Before(hidden, (product if self.order is None else product[:, self.order],))

    def after(self, ops: Ops, before: Before, mixed: Any, beside: tuple[Any, ...]) -> Stream:
        """See `DecoderLayer`."""
        for gate in before.kept:
            mixed = ops.activate("sigmoid", gate, mixed)
        hidden, normed = ops.add_and_norm(before.hidden, ops.product(mixed, self.out), self.mlp_norm)
        return Stream(hidden, ops.mlp(normed, self.mlp))


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    return read_alike(model, _check, _layer, is_tied=model.args.tie_word_embeddings)


def read_layer(layer: Any) -> QwenNextLayer:
    """The weights of a layer alone. Raises Unsupported."""
    _check(layer)
    return _layer(layer)


def _check(layer: Any) -> None:
    mixer = "linear_attn" if layer.is_linear else "self_attn"
    expect_parts(layer, mixer, "input_layernorm", "post_attention_layernorm", "mlp")
    if layer.is_linear:
        net = layer.linear_attn
        expect_parts(net, "conv1d", *_inputs(net), "out_proj", "norm", "dt_bias", "A_log")
        expect_products(*(net[name] for name in _inputs(net)), net.out_proj)
    else:
        expect_attention(layer.self_attn, "q_norm", "k_norm")
    mlp = layer.mlp
    if "switch_mlp" in mlp:
        expect_experts(mlp, "shared_expert", "shared_expert_gate")
        expect_products(mlp.gate, mlp.shared_expert_gate)


def _inputs(net: Any) -> tuple[str, ...]:
    """The products of a layer with the delta rule: Qwen3.5's, or those that Qwen3-Next has joined."""
    if "in_proj_qkv" in net:
        return "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    return "in_proj_qkvz", "in_proj_ba"


def _layer(layer: Any) -> QwenNextLayer:
    dtype: mx.Dtype = layer.input_layernorm.weight.dtype
    order: mx.array | None = None
    mixer: Mixer
    if layer.is_linear:
        net = layer.linear_attn
        inputs, out = joined([net[name] for name in _inputs(net)]), net.out_proj
        mixer = _delta(net, dtype)
        if "in_proj_qkvz" in net:
            order = mx.array(_joined_order(mixer.shape))
    else:
        attention = layer.self_attn
        inputs, out = qkv_of(attention), attention.o_proj
        heads, key_heads = attention.num_attention_heads, attention.num_key_value_heads
        norms = query_key_norms(norm_of(attention.q_norm), norm_of(attention.k_norm), heads, key_heads)
        mixer = HeadShape(
            heads,
            key_heads,
            attention.head_dim,
            attention.scale,
            rotation_of(attention.rope),
            norms,
            None,
            dtype,
            gated=True,
        )
    return QwenNextLayer(
        norm_of(layer.input_layernorm),
        inputs,
        order,
        mixer,
        linear_of(out),
        norm_of(layer.post_attention_layernorm),
        _experts(layer.mlp) if "switch_mlp" in layer.mlp else gated_of(layer.mlp),
    )


def _delta(net: Any, dtype: mx.Dtype) -> GatedDelta:
    shape = DeltaShape(
        net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, net.conv_kernel_size, dtype
    )
    conv, a_log = net.conv1d.weight[:, :, 0], net.A_log.astype(mx.float32)
    mx.eval(conv, a_log)
    return GatedDelta(shape, DeltaWeights(conv, a_log, net.dt_bias, net.norm.weight, net.norm.eps))


def _joined_order(shape: DeltaShape) -> np.ndarray:
    """The indices of the outputs that `GatedDelta` takes, all queries, keys and values, z, b and a, in the joined
    products of Qwen3-Next, which are ordered by key head."""
    group = shape.value_heads // shape.key_heads
    widths = (shape.key_dim, shape.key_dim, group * shape.value_dim, group * shape.value_dim)
    wide = np.arange(shape.key_heads * sum(widths)).reshape(shape.key_heads, -1)
    parts = np.split(wide, np.cumsum(widths)[:-1], axis=1)
    both = wide.size + np.arange(2 * shape.value_heads).reshape(shape.key_heads, 2 * group)
    parts += [both[:, :group], both[:, group:]]
    return np.concatenate([part.ravel() for part in parts]).astype(np.int32)


def _experts(mlp: Any) -> Experts:
    gated = gated_of(mlp.switch_mlp)
    router = Router(linear_of(mlp.gate), mlp.top_k, normalised=mlp.norm_topk_prob)
    shared, shared_gate = gated_of(mlp.shared_expert), linear_of(mlp.shared_expert_gate)
    return Experts(router, gated.gate_up, gated.down, shared=shared, shared_gate=shared_gate)


HEAD = HeadForm(
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    read_layer,
    layer="layers.0.",
    lacks_one=True,
)
