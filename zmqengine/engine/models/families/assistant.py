"""Gemma 4's assistants: a few layers of Gemma 4's that have queries alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.draft_head import AssistantWeights, WordClusters
from zmqengine.engine.models.families.gemma import read_fourth
from zmqengine.engine.models.families.reading import floats_as, linear_of, load, norm_of
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.mlx_lm import Gemma4Args, Gemma4Layer

# Fields of its layers that change the computation, with the value of what is computed here.
_FIXED: tuple[tuple[str, Any], ...] = (
    ("hidden_size_per_layer_input", 0),
    ("enable_moe_block", False),
    ("use_double_wide_mlp", False),
)


def read(
    config: Mapping[str, Any], tensors: Mapping[str, mx.array], model: DecoderWeights
) -> AssistantWeights:
    """The weights of an assistant of a model. Raises `Unsupported`."""
    text, dim = config.get("text_config"), model.norm.weight.size
    if not isinstance(text, dict):
        raise Unsupported("its config has no text_config")
    for name, value in _FIXED:
        if text.get(name, value) not in (value, None):
            raise Unsupported(f"it is computed in another way ({name} is {text[name]!r})")
    if config.get("backbone_hidden_size") != dim:
        raise Unsupported(f"it was made for a model of width {config.get('backbone_hidden_size')}, not {dim}")
    args = _args(text, model)
    named = floats_as(tensors, model.norm.weight.dtype)
    ordering = named.pop("masked_embedding.token_ordering", None)
    module = _module(config, args, named, dim)
    load(module, named)
    inner = module.model
    return AssistantWeights(
        linear_of(module.pre_projection),
        tuple(read_fourth(layer, args.sliding_window) for layer in inner.layers),
        norm_of(inner.norm),
        linear_of(module.post_projection),
        linear_of(module.lm_head if "lm_head" in module else inner.embed_tokens),
        _clusters(config, module, ordering),
    )


def _args(text: Mapping[str, Any], model: DecoderWeights) -> Any:
    """Arguments of its layers, none of which has keys and values."""
    words = model.head.outputs
    if text.get("vocab_size") != words:
        raise Unsupported(f"it has {text.get('vocab_size')} words, and the model {words}")
    told = {**text, **dict(_FIXED), "num_kv_shared_layers": text.get("num_hidden_layers", 0)}
    try:
        return Gemma4Args.from_dict(told)  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise Unsupported(f"its config is not one of Gemma 4's layers: {error}") from None


def _module(config: Mapping[str, Any], args: Any, named: Mapping[str, mx.array], dim: int) -> Any:
    """Modules for its tensors. `dim`: numbers of the model's hidden state."""
    own, eps = args.hidden_size, args.rms_norm_eps
    assistant, inner = Module(), Module()  # type: ignore[no-untyped-call]
    inner.embed_tokens = Embedding(args.vocab_size, own)
    inner.layers = [Gemma4Layer(args, number) for number in range(args.num_hidden_layers)]
    inner.norm = RMSNorm(own, eps)
    assistant.model = inner
    assistant.pre_projection = LinearModule(2 * dim, own, bias=False)
    assistant.post_projection = LinearModule(own, dim, bias=False)
    if "lm_head.weight" in named:
        assistant.lm_head = LinearModule(own, args.vocab_size, bias=False)
    if config.get("use_ordered_embeddings"):
        assistant.masked_embedding = Module()  # type: ignore[no-untyped-call]
        assistant.masked_embedding.centroids = LinearModule(own, config.get("num_centroids", 0), bias=False)
    return assistant


def _clusters(config: Mapping[str, Any], module: Any, ordering: mx.array | None) -> WordClusters | None:
    """The clusters of its words, which `ordering` has one after another."""
    if "masked_embedding" not in module:
        return None
    product, count = (
        linear_of(module.masked_embedding.centroids),
        config.get("centroid_intermediate_top_k", 0),
    )
    words = module.model.embed_tokens.weight.shape[0]
    if (
        ordering is None
        or ordering.size != words
        or words % product.outputs
        or not 0 < count <= product.outputs
    ):
        raise Unsupported("its clusters of words are others (token_ordering)")
    of_word = np.empty(words, np.int32)
    of_word[np.array(ordering)] = np.arange(words) // (words // product.outputs)
    return WordClusters(product, mx.array(of_word), count)
