"""Gemma 3 and 4: norms before and after attention and MLP, windows in most layers.

Gemma 4 adds inputs of each layer's own, layers that read the keys and values of earlier ones, a mixture of experts
beside the MLP, and norms of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.models.architecture import Before, DecoderWeights, Stream
from zmqengine.engine.models.families.reading import (
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
from zmqengine.engine.models.layers import (
    Experts,
    Gated,
    HeadShape,
    Linear,
    Norm,
    QueryKeyNorms,
    Router,
    Unsupported,
)
from zmqengine.engine.models.ops import Ops

MODULES = ("gemma3_text", "gemma4_text")


class GemmaLayer(NamedTuple):
    """A decoder layer. `inputs`: queries, keys and values; only queries in a layer that reads another's keys."""

    input_norm: Norm
    inputs: tuple[Linear, ...]
    mixer: HeadShape
    out: Linear
    out_norm: Norm
    mlp_norm: Norm
    mlp: Gated
    mlp_out_norm: Norm
    experts: ExpertsBeside | None = None
    own: OwnInput | None = None
    scale: mx.array | None = None

    def before(self, ops: Ops, stream: Stream, positions: Any) -> Before:
        """See `DecoderLayer`."""
        hidden, normed = stream.summed(ops, self.input_norm)
        product = ops.product(normed, *self.inputs)
        return Before(hidden, ops.rotate(product, self.mixer, positions))

    def after(self, ops: Ops, before: Before, mixed: Any, beside: tuple[Any, ...]) -> Stream:
        """See `DecoderLayer`."""
        attended = ops.product(mixed, self.out)
        hidden, normed = ops.add_and_norm(before.hidden, attended, self.mlp_norm, self.out_norm)
        outputs = ops.mlp(normed, self.mlp)
        if self.experts is not None:
            outputs = self.experts.added_to(ops, outputs, hidden)
        stream = Stream(hidden, outputs, self.mlp_out_norm)
        if self.own is not None:
            stream = self.own.added_to(ops, stream.total(ops), *beside)
        return stream._replace(scale=self.scale)


class ExpertsBeside(NamedTuple):
    """A mixture of experts beside the MLP; the router has a norm of its own."""

    mlp_out_norm: Norm
    norm: Norm
    router_norm: Norm
    experts: Experts
    out_norm: Norm

    def added_to(self, ops: Ops, outputs: Any, hidden: Any) -> Any:
        """The outputs of the MLP and of the experts, each normed, added up."""
        routed_by = ops.norm(hidden, self.router_norm)
        mixture = ops.mlp(ops.norm(hidden, self.norm), self.experts, routed_by)
        return ops.norm(outputs, self.mlp_out_norm) + ops.norm(mixture, self.out_norm)


class OwnInput(NamedTuple):
    """The part of a layer that takes its own input."""

    gate: Linear
    projection: Linear
    norm: Norm

    def added_to(self, ops: Ops, hidden: Any, own: Any) -> Stream:
        """The hidden states, and what is added to them for an input [tokens, width]."""
        gated = ops.activate("gelu", ops.product(hidden, self.gate), own)
        return Stream(hidden, ops.product(gated, self.projection), self.norm)


class OwnInputs(NamedTuple):
    """Inputs of each layer's own: `LayerInputs` from a second embedding, and a projection of the first."""

    embedding: Linear
    projection: Linear
    norm: Norm
    layers: int

    def compute(self, ops: Ops, tokens: Any, hidden: Any) -> list[Any]:
        """See `LayerInputs`."""
        shape = tokens.shape[0], self.layers, -1
        embedded = ops.embed(tokens, self.embedding).reshape(shape)
        projected = (ops.product(hidden, self.projection) * hidden.shape[-1] ** -0.5).reshape(shape)
        inputs = (ops.norm(projected, self.norm) + embedded * embedded.shape[-1] ** 0.5) * 2**-0.5
        return [inputs[:, layer] for layer in range(self.layers)]


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    inner = model.model
    is_tied = "lm_head" not in model
    head = inner.embed_tokens if is_tied else model.lm_head
    is_third = type(model).__module__.endswith("gemma3_text")
    if inner.embed_tokens.weight.dtype == mx.float16 or inner.norm.weight.dtype == mx.float16:
        raise Unsupported("Gemma in float16 bounds its hidden states")
    for layer in inner.layers:
        _check(layer)
    if is_third:
        layers = tuple(_third(layer, inner) for layer in inner.layers)
        # mlx-lm rounds the factor.
        scale: float = mx.array(model.args.hidden_size**0.5, mx.bfloat16).item()  # type: ignore[assignment]
        return DecoderWeights(
            linear_of(inner.embed_tokens), layers, _shifted(inner.norm), linear_of(head), scale
        )
    layers = tuple(read_fourth(layer, inner.window_size) for layer in inner.layers)
    own = None
    if inner.hidden_size_per_layer_input:
        own = OwnInputs(
            linear_of(inner.embed_tokens_per_layer),
            linear_of(inner.per_layer_model_projection),
            norm_of(inner.per_layer_projection_norm),
            len(layers),
        )
    sources = tuple(inner.previous_kvs)
    return DecoderWeights(
        linear_of(inner.embed_tokens),
        layers,
        norm_of(inner.norm),
        linear_of(head),
        inner.embed_scale,
        model.final_logit_softcapping,
        () if sources == tuple(range(len(layers))) else sources,
        own,
    )


_PARTS = (
    "input_layernorm", "self_attn", "post_attention_layernorm", "pre_feedforward_layernorm", "mlp",
    "post_feedforward_layernorm",
)  # fmt: skip
_FOURTH_PARTS = (
    "router", "experts", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2", "per_layer_input_gate", "per_layer_projection",
    "post_per_layer_input_norm", "layer_scalar",
)  # fmt: skip


def _check(layer: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    expect_parts(layer, *_PARTS, optional=_FOURTH_PARTS)
    expect_parts(
        attention, "q_proj", "o_proj", "q_norm", "rope", optional=["k_proj", "v_proj", "k_norm", "v_norm"]
    )
    expect_parts(mlp, "gate_proj", "up_proj", "down_proj")
    products = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj") if name in attention]
    expect_products(*products, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    rotation_of(attention.rope)


def _shifted(module: Any) -> Norm:
    """A norm of Gemma 3, which multiplies by 1 + its weight."""
    weight = 1.0 + module.weight
    mx.eval(weight)
    return Norm(weight, module.eps)


def _third(layer: Any, inner: Any) -> GemmaLayer:
    attention = layer.self_attn
    heads, key_heads = attention.n_heads, attention.n_kv_heads
    norms = query_key_norms(_shifted(attention.q_norm), _shifted(attention.k_norm), heads, key_heads)
    mixer = HeadShape(
        heads,
        key_heads,
        attention.head_dim,
        attention.scale,
        rotation_of(attention.rope),
        norms,
        inner.window_size if attention.is_sliding else None,
        layer.input_layernorm.weight.dtype,
    )
    return GemmaLayer(
        _shifted(layer.input_layernorm),
        qkv_of(attention),
        mixer,
        linear_of(attention.o_proj),
        _shifted(layer.post_attention_layernorm),
        _shifted(layer.pre_feedforward_layernorm),
        gated_of(layer.mlp, "gelu"),
        _shifted(layer.post_feedforward_layernorm),
    )


def read_fourth(layer: Any, window: int) -> GemmaLayer:
    """The weights of a layer of Gemma 4."""
    attention = layer.self_attn
    mixer = HeadShape(
        attention.n_heads,
        attention.n_kv_heads,
        attention.head_dim,
        attention.scale,
        rotation_of(attention.rope),
        _fourth_norms(attention),
        window if attention.is_sliding else None,
        layer.input_layernorm.weight.dtype,
        value_eps=attention.v_norm.eps if attention.has_kv else None,
        keys_are_values=attention.has_kv and attention.use_k_eq_v,
        reads_only=not attention.has_kv,
    )
    products = [attention[name] for name in ("q_proj", "k_proj", "v_proj") if name in attention]
    own = None
    if layer.hidden_size_per_layer_input:
        own = OwnInput(
            linear_of(layer.per_layer_input_gate),
            linear_of(layer.per_layer_projection),
            norm_of(layer.post_per_layer_input_norm),
        )
    return GemmaLayer(
        norm_of(layer.input_layernorm),
        joined(products),
        mixer,
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        norm_of(layer.pre_feedforward_layernorm),
        gated_of(layer.mlp, "gelu"),
        norm_of(layer.post_feedforward_layernorm),
        _experts_beside(layer) if layer.enable_moe else None,
        own,
        layer.layer_scalar,
    )


def _fourth_norms(attention: Any) -> QueryKeyNorms:
    queries = norm_of(attention.q_norm)
    if attention.has_kv:
        return query_key_norms(queries, norm_of(attention.k_norm), attention.n_heads, attention.n_kv_heads)
    return query_key_norms(queries, queries, attention.n_heads, 0)


def _experts_beside(layer: Any) -> ExpertsBeside:
    router, gated = layer.router, gated_of(layer.experts.switch_glu, "gelu")
    weight = router.scale * router._root_size
    mx.eval(weight)
    choice = Router(
        linear_of(router.proj), router.config.top_k_experts, "chosen", scale=router.per_expert_scale
    )
    return ExpertsBeside(
        norm_of(layer.post_feedforward_layernorm_1),
        norm_of(layer.pre_feedforward_layernorm_2),
        Norm(weight, router.eps),
        Experts(choice, gated.gate_up, gated.down, "gelu"),
        norm_of(layer.post_feedforward_layernorm_2),
    )
