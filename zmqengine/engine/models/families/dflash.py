"""DFlash: a drafter that fills a block at once, of a few layers of Qwen3's that see states of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear as LinearModule
from mlx.nn.layers.normalization import RMSNorm

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.draft_head import BlockWeights
from zmqengine.engine.models.families.llama import read_layer
from zmqengine.engine.models.families.reading import floats_as, linear_of, load, norm_of
from zmqengine.engine.models.layers import Unsupported
from zmqengine.engine.models.mlx_lm import Qwen3Args, Qwen3Layer

# Fields that change the computation, with the values of what is computed here.
_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu",)),
    ("causal", (False,)),
    ("is_causal", (False,)),
    ("use_swa", (False,)),
    ("attention_sink_bias", (False,)),
    ("final_logit_softcapping", ()),
    ("input_embedding_scale", (1.0,)),
    ("output_multiplier", (1.0,)),
    ("conv_kernel_size", ()),
    ("selector_rank", ()),
    ("use_aux_hidden_state", (True,)),
)


def read(config: Mapping[str, Any], tensors: Mapping[str, mx.array], model: DecoderWeights) -> BlockWeights:
    """The weights of a drafter for a model. Raises `Unsupported`."""
    within = config.get("dflash_config")
    told = {**config, **(within if isinstance(within, dict) else {})}
    taps = _check(told, model)
    named = {
        name.removeprefix("model."): array
        for name, array in floats_as(tensors, model.norm.weight.dtype).items()
    }
    module = _module(told, len(taps) * model.norm.weight.size)
    load(module, named)
    return BlockWeights(
        linear_of(module.fc),
        norm_of(module.hidden_norm),
        tuple(read_layer(layer) for layer in module.layers),
        norm_of(module.norm),
        taps,
        told["block_size"],
        told["mask_token_id"],
    )


def _check(told: Mapping[str, Any], model: DecoderWeights) -> tuple[int, ...]:
    """Numbers of layers after which it takes hidden states. It has those of layers whose outputs these are."""
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        if not told.get(name):
            raise Unsupported(f"its config has no {name}")
    for name, values in _FIXED:
        if told.get(name) not in (*values, None):
            raise Unsupported(f"it is computed in another way ({name} is {told[name]!r})")
    if any(kind != "full_attention" for kind in told.get("layer_types") or ()):
        raise Unsupported("some of its layers see a window alone (layer_types)")
    layers, words = len(model.layers), len(model.embedding.weight)
    if told.get("num_target_layers") not in (layers, None):
        raise Unsupported(
            f"it was made for a model of {told['num_target_layers']} layers, and this has {layers}"
        )
    if told["block_size"] < 2 or told["mask_token_id"] >= words:
        raise Unsupported(f"its mask token is {told['mask_token_id']}, and the model has {words} tokens")
    taps = tuple(sorted({number + 1 for number in told["target_layer_ids"]}))
    if taps[-1] > layers:
        raise Unsupported(
            f"it takes hidden states after layers {list(taps)}, and the model has {layers} layers"
        )
    return taps


def _module(told: Mapping[str, Any], states: int) -> Any:
    """Modules for its tensors. `states`: numbers of the model's hidden states of one token."""
    try:
        args = Qwen3Args.from_dict({"tie_word_embeddings": True, **told})  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise Unsupported(f"its config is not one of Qwen3's layers: {error}") from None
    drafter = Module()  # type: ignore[no-untyped-call]
    drafter.layers = [Qwen3Layer(args) for _ in range(args.num_hidden_layers)]
    drafter.fc = LinearModule(states, args.hidden_size, bias=False)
    drafter.hidden_norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
    drafter.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
    return drafter
