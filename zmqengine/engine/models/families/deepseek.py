"""DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash: multi-head latent attention, and experts chosen among groups.

A token's keys and values of all heads come out of one latent c, its position out of one rotated key r that all heads
share. Per head, with up-projections U (keys) and V (values), a query (q, p) of which p is rotated:

    score = q U c + p r = (q U) c + p r
    output = sum of shares V c = V (sum of shares c)

So queries are multiplied by U and outputs by V, and attention has one key head: its keys are (r, c), its values c. A
slot holds (r, c) alone. "DeepSeek-V2" (2024, arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.models.architecture import Before, DecoderWeights, Stream
from zmqengine.engine.models.families.glm4_moe import check_mlp, experts_of, mixture_of
from zmqengine.engine.models.families.reading import (
    expect_parts,
    expect_products,
    gated_of,
    joined,
    linear_of,
    norm_of,
    read_alike,
    rotation_of,
    with_view,
)
from zmqengine.engine.models.layers import Experts, Gated, HeadShape, Linear, Norm, Router
from zmqengine.engine.models.ops import Ops, dequantised

MODULES = ("deepseek_v2", "deepseek_v3", "kimi_k25", "kimi_vl", "glm4_moe_lite")


class LatentLayer(NamedTuple):
    """A decoder layer. `inputs`: the product of queries, or of their latent, and of c and r.

    `query_norm` and `queries`: queries out of their latent, where they have one. `keys` [heads, rank, dim] and `values`
    [heads, dim, rank]: U and V of each head.
    """

    input_norm: Norm
    inputs: tuple[Linear, ...]
    query_norm: Norm | None
    queries: Linear | None
    latent_norm: Norm
    keys: Linear
    values: Linear
    mixer: HeadShape
    out: Linear
    mlp_norm: Norm
    mlp: Gated | Experts

    def before(self, ops: Ops, stream: Stream, positions: Any) -> Before:
        """See `DecoderLayer`."""
        hidden, normed = stream.summed(ops, self.input_norm)
        product = ops.product(normed, *self.inputs)
        heads, dim, tokens = self.mixer.heads, self.keys.inputs, len(product)
        rank = self.keys.outputs
        width = product.shape[-1] - self.mixer.dim
        queries, latent, shared = (
            product[:, :width],
            product[:, width : width + rank],
            product[:, width + rank :],
        )
        if self.queries is not None and self.query_norm is not None:
            queries = ops.product(ops.norm(queries, self.query_norm), self.queries)
        queries = queries.reshape(tokens, heads, -1)
        turned = ops.concatenate(queries[..., dim:], ops.product_by_head(queries[..., :dim], self.keys))
        keys = ops.concatenate(shared, ops.norm(latent, self.latent_norm))
        both = ops.concatenate(turned.reshape(tokens, -1), keys)
        return Before(hidden, ops.rotate(both, self.mixer, positions))

    def after(self, ops: Ops, before: Before, mixed: Any, beside: tuple[Any, ...]) -> Stream:
        """See `DecoderLayer`."""
        tokens = len(mixed)
        values = ops.product_by_head(mixed.reshape(tokens, self.mixer.heads, -1), self.values)
        attended = ops.product(values.reshape(tokens, -1), self.out)
        hidden, normed = ops.add_and_norm(before.hidden, attended, self.mlp_norm)
        return Stream(hidden, ops.mlp(normed, self.mlp))


def read(model: Any) -> DecoderWeights:
    """The weights of a model. See `families.read_weights`."""
    return read_alike(model, _check, _layer)


def _check(layer: Any) -> None:
    expect_parts(layer, "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    attention = layer.self_attn
    queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if "q_a_proj" in attention else ("q_proj",)
    ups = ("kv_b_proj",) if "kv_b_proj" in attention else ("embed_q", "unembed_out")
    products = [name for name in (*queries, *ups) if name != "q_a_layernorm"]
    expect_parts(attention, *queries, *ups, "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj", "rope")
    expect_products(*(attention[name] for name in (*products, "kv_a_proj_with_mqa", "o_proj")))
    check_mlp(layer.mlp)


def _layer(layer: Any) -> LatentLayer:
    attention = layer.self_attn
    dtype: mx.Dtype = layer.input_layernorm.weight.dtype
    query_norm, queries, first = None, None, attention.get("q_proj")
    if first is None:
        first = attention.q_a_proj
        query_norm, queries = norm_of(attention.q_a_layernorm), linear_of(attention.q_b_proj)
    rank = attention.kv_lora_rank
    mixer = HeadShape(
        attention.num_heads,
        1,
        attention.qk_rope_head_dim + rank,
        attention.scale,
        rotation_of(attention.rope),
        None,
        None,
        dtype,
        value_dims=rank,
    )
    return LatentLayer(
        norm_of(layer.input_layernorm),
        joined([first, attention.kv_a_proj_with_mqa]),
        query_norm,
        queries,
        norm_of(attention.kv_a_layernorm),
        *_ups(attention),
        mixer,
        linear_of(attention.o_proj),
        norm_of(layer.post_attention_layernorm),
        _mlp(layer.mlp),
    )


def _ups(attention: Any) -> tuple[Linear, Linear]:
    """U and V of each head. V2 has both in one product; packed along c, it cannot be multiplied by queries."""
    if "embed_q" in attention:
        return linear_of(attention.embed_q), linear_of(attention.unembed_out)
    both = linear_of(attention.kv_b_proj)
    weight = dequantised(both) if both.bits else both.weight
    weight = weight.reshape(attention.num_heads, -1, weight.shape[-1])
    keys = mx.contiguous(weight[:, : attention.qk_nope_head_dim].swapaxes(-1, -2))
    values = mx.contiguous(weight[:, attention.qk_nope_head_dim :])
    mx.eval(keys, values)
    return with_view(Linear(keys)), with_view(Linear(values))


def _mlp(mlp: Any) -> Gated | Experts:
    if "switch_mlp" not in mlp:
        return gated_of(mlp)
    if "e_score_correction_bias" in mlp.gate:
        return experts_of(mlp)
    # V2: shares by a softmax over all experts, and a group is as good as its best one.
    gate = mlp.gate
    is_limited = gate.topk_method == "group_limited_greedy"
    router = Router(
        with_view(Linear(gate.weight)),
        gate.top_k,
        scale=float(gate.routed_scaling_factor),
        groups=gate.n_group if is_limited else 1,
        groups_used=gate.topk_group if is_limited else 1,
        group_best=1,
    )
    return mixture_of(mlp, router)
