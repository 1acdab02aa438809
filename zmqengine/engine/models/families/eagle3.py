"""EAGLE-3: a drafter that takes hidden states after three layers of its model, and has one layer of Llama's.

A product joins the three to the state of a token. The layer's queries, keys and values are products of the embedding of
the next token and of that state, each after a norm. A vocabulary of its own has the most frequent tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.architecture import Before, DecoderWeights, Stream
from zmqengine.engine.models.decoder import HiddenStates
from zmqengine.engine.models.draft_head import HeadVocabulary
from zmqengine.engine.models.families.reading import (
    floats_as,
    gated_of,
    linear_of,
    load,
    norm_of,
    qkv_of,
    rotation_of,
)
from zmqengine.engine.models.layers import Gated, HeadShape, Linear, Norm, Unsupported
from zmqengine.engine.models.mlx_lm import initialize_rope
from zmqengine.engine.models.ops import Ops

# Tensors that are not weights: the model's tokens that the vocabulary has, as flags, and speeds of the rotation.
_UNUSED = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq")
# Fields that change the computation, the value that is computed here, and what another one means.
_FIXED: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "silu", "its MLP has another activation"),
    ("logit_scale", 1.0, "its logits are scaled"),
    ("use_aux_hidden_state", True, "it takes no hidden states of chosen layers"),
    ("use_input_layernorm_in_first_layer", True, "its embeddings have no norm"),
    ("use_last_layernorm", True, "it has no last norm"),
    ("use_mtp_layernorm", False, "it has norms of another kind of head"),
    ("norm_output", False, "its output is normed before it is fed back"),
    ("parallel_drafting", False, "it drafts several tokens at once"),
    ("parallel_draft_step", 1, "it drafts several tokens at once"),
)


class EagleWeights(NamedTuple):
    """Weights of an EAGLE-3 drafter: `PairWeights`.

    `join` [dim, states' dims], after `join_norm` if there is one. `inputs` take the embedding and the state, each after
    its norm; with `residual_is_normed` the residual is the latter after its norm.
    """

    join: Linear
    join_norm: Norm | None
    embedding_norm: Norm
    hidden_norm: Norm
    inputs: tuple[Linear, ...]
    mixer: HeadShape
    out: Linear
    mlp_norm: Norm
    mlp: Gated
    norm: Norm
    vocabulary: HeadVocabulary
    taps: tuple[int, ...]
    residual_is_normed: bool

    def states(self, ops: Ops, hidden: HiddenStates) -> Any:
        """See `PairWeights`."""
        joined = mx.concatenate(hidden.tapped, axis=-1)
        return ops.product(joined if self.join_norm is None else ops.norm(joined, self.join_norm), self.join)

    def before(self, ops: Ops, embeddings: Any, hidden: Any, positions: Any) -> Before:
        """See `PairWeights`."""
        normed = ops.norm(hidden, self.hidden_norm)
        pair = mx.concatenate([ops.norm(embeddings, self.embedding_norm), normed], axis=-1)
        rotated = ops.rotate(ops.product(pair, *self.inputs), self.mixer, positions)
        return Before(normed if self.residual_is_normed else hidden, rotated)

    def after(self, ops: Ops, before: Before, mixed: Any) -> tuple[Any, Any]:
        """See `PairWeights`."""
        hidden, normed = ops.add_and_norm(before.hidden, ops.product(mixed, self.out), self.mlp_norm)
        return Stream(hidden, ops.mlp(normed, self.mlp)).summed(ops, self.norm)


def read(config: Mapping[str, Any], tensors: Mapping[str, mx.array], model: DecoderWeights) -> EagleWeights:
    """The weights of a drafter for a model. Raises `Unsupported`."""
    of_layer = config.get("transformer_layer_config")
    told = {**config, **(of_layer if isinstance(of_layer, dict) else {})}
    eagle = config.get("eagle_config")
    _check({**told, **(eagle if isinstance(eagle, dict) else {})})
    dtype = model.norm.weight.dtype
    named = {_name(name): array for name, array in floats_as(tensors, dtype).items()}
    taps = _taps(config, len(model.layers))
    module = _module(told, named, len(taps) * model.norm.weight.size)
    offsets = named.pop("d2t", None)
    load(module, {name: array for name, array in named.items() if name not in _UNUSED})
    (layer,) = module.layers
    return EagleWeights(
        linear_of(module.fc),
        norm_of(module.input_norm) if "input_norm" in module else None,
        norm_of(layer.input_layernorm),
        norm_of(layer.hidden_norm),
        qkv_of(layer.self_attn),
        _heads(told, layer.self_attn, dtype),
        linear_of(layer.self_attn.o_proj),
        norm_of(layer.post_attention_layernorm),
        gated_of(layer.mlp),
        norm_of(module.norm),
        _vocabulary(module, offsets, model),
        taps,
        # Drafters of the project speculators have the norm before it unless they say otherwise.
        bool(told.get("norm_before_residual", "speculators_model_type" in config)),
    )


def _check(told: Mapping[str, Any]) -> None:
    for field, value, meaning in _FIXED:
        if told.get(field, value) not in (value, None):
            raise Unsupported(f"{meaning} ({field} is {told[field]!r})")


def _name(name: str) -> str:
    """The name of a tensor, whichever project wrote it."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _taps(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of layers after which it takes hidden states.

    Drafters count in two ways. Where the first number is 1 they number layers from 0 and mean the output of each, else
    its input, as where they say nothing.
    """
    eagle = config.get("eagle_config")
    within = eagle if isinstance(eagle, dict) else {}
    name = "eagle_aux_hidden_state_layer_ids"
    told: Sequence[int] = config.get(name) or within.get(name) or ()
    taps = sorted(told) or [2, layers // 2, layers - 3]
    if told and taps[0] == 1:
        taps = [number + 1 for number in taps]
    if len(set(taps)) < len(taps) or not 0 <= taps[0] <= taps[-1] <= layers:
        raise Unsupported(f"it takes hidden states after layers {taps}, and the model has {layers} layers")
    return tuple(taps)


def _module(told: Mapping[str, Any], named: Mapping[str, mx.array], states: int) -> Any:
    """Modules for its tensors. `states`: numbers of the model's hidden states of one token."""
    try:
        dim, inner, eps = told["hidden_size"], told["intermediate_size"], told.get("rms_norm_eps", 1e-6)
        heads, key_heads = told["num_attention_heads"], told["num_key_value_heads"]
    except KeyError as error:
        raise Unsupported(f"its config has no {error.args[0]}") from None
    head_dim = told.get("head_dim") or dim // heads

    def linear(name: str, inputs: int, outputs: int) -> LinearModule:
        return LinearModule(inputs, outputs, bias=f"{name}.bias" in named)

    def attention(name: str, inputs: int, outputs: int) -> LinearModule:
        return linear(f"layers.0.self_attn.{name}", inputs, outputs)

    head, layer = Module(), Module()  # type: ignore[no-untyped-call]
    layer.input_layernorm, layer.hidden_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
    layer.post_attention_layernorm = RMSNorm(dim, eps)
    layer.self_attn = Module()  # type: ignore[no-untyped-call]
    layer.self_attn.q_proj = attention("q_proj", 2 * dim, heads * head_dim)
    layer.self_attn.k_proj = attention("k_proj", 2 * dim, key_heads * head_dim)
    layer.self_attn.v_proj = attention("v_proj", 2 * dim, key_heads * head_dim)
    layer.self_attn.o_proj = attention("o_proj", heads * head_dim, dim)
    layer.mlp = Module()  # type: ignore[no-untyped-call]
    for name, inputs, outputs in (
        ("gate_proj", dim, inner),
        ("up_proj", dim, inner),
        ("down_proj", inner, dim),
    ):
        layer.mlp[name] = linear(f"layers.0.mlp.{name}", inputs, outputs)
    head.layers, head.fc, head.norm = [layer], linear("fc", states, dim), RMSNorm(dim, eps)
    if "input_norm.weight" in named:
        head.input_norm = RMSNorm(states, eps)
    if "embed_tokens.weight" in named:
        head.embed_tokens = Embedding(told.get("vocab_size", 0), dim)
    if "lm_head.weight" in named:
        words = told.get("draft_vocab_size") or told.get("vocab_size", 0)
        head.lm_head = LinearModule(dim, words, bias=False)
    return head


def _heads(told: Mapping[str, Any], attention: Any, dtype: mx.Dtype) -> HeadShape:
    heads, key_heads = told["num_attention_heads"], told["num_key_value_heads"]
    dim = linear_of(attention.q_proj).outputs // heads
    told_rope = told.get("rope_parameters")
    parameters = told_rope if isinstance(told_rope, dict) else {}
    scaling = told.get("rope_scaling") or parameters or None
    base = parameters.get("rope_theta") or told.get("rope_theta") or 10000.0
    turned = int(dim * (parameters.get("partial_rotary_factor") or told.get("partial_rotary_factor") or 1))
    try:
        rope = initialize_rope(turned, base, False, scaling, told.get("max_position_embeddings"))
    except (KeyError, ValueError) as error:
        raise Unsupported(f"its rotation is another: {error}") from None
    return HeadShape(heads, key_heads, dim, dim**-0.5, rotation_of(rope), None, None, dtype)


def _vocabulary(module: Any, offsets: mx.array | None, model: DecoderWeights) -> HeadVocabulary:
    """Its own embedding and vocabulary. `offsets`: how far the token of the model is ahead of each of its words."""
    words, is_as_wide = model.head.outputs, module.norm.weight.size == model.norm.weight.size
    embedding = linear_of(module.embed_tokens) if "embed_tokens" in module else None
    product = linear_of(module.lm_head) if "lm_head" in module else None
    if not is_as_wide and (embedding is None or product is None):
        raise Unsupported("it is not as wide as the model, and has no embed_tokens or no lm_head")
    if embedding is not None and len(embedding.weight) < words:
        raise Unsupported(f"it has embeddings of {len(embedding.weight)} tokens, and the model has {words}")
    if product is None:
        if offsets is not None:
            raise Unsupported("it has words of its own (d2t), and no lm_head")
        return HeadVocabulary(embedding)
    if offsets is not None and offsets.size != product.outputs:
        raise Unsupported(f"it has {product.outputs} words, and d2t has {offsets.size}")
    if offsets is None and product.outputs == words:
        return HeadVocabulary(embedding, product)
    targets = mx.arange(product.outputs) + (0 if offsets is None else offsets.astype(mx.int32))
    if mx.any((targets < 0) | (targets >= words)).item():
        raise Unsupported(f"it drafts tokens that the model, which has {words}, does not have")
    return HeadVocabulary(embedding, product, targets)
