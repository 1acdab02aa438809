"""Families of decoders: a file each, which says how its layers are put together and where mlx-lm has their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.architecture import DecoderWeights
from zmqengine.engine.models.draft_head import AnyWeights, HeadWeights
from zmqengine.engine.models.families import (
    assistant,
    deepseek,
    dflash,
    eagle3,
    gemma,
    glm4_moe,
    gpt_oss,
    heads,
    lfm2,
    llama,
    qwen_next,
)
from zmqengine.engine.models.families.reading import put_in_columns
from zmqengine.engine.models.layers import Unsupported

_FAMILIES = (llama, gemma, gpt_oss, glm4_moe, deepseek, qwen_next, lfm2)
HEAD_FORMS = {
    **dict.fromkeys(qwen_next.MODULES, qwen_next.HEAD),
    **dict.fromkeys(glm4_moe.MODULES, glm4_moe.HEAD),
    "mimo": llama.MIMO_HEAD,
}
"""Heads, by mlx-lm's module of the model."""


def read_weights(model: Any, *, in_columns: bool = False) -> DecoderWeights:
    """The weights of a model of mlx-lm, whose modules keep views of them. Raises Unsupported.

    For a model with images: those of its `language_model`. `in_columns`: the weights of an output become a column in
    memory, except those of experts.
    """
    model = getattr(model, "language_model", model)
    package, _, name = type(model).__module__.rpartition(".")
    for family in _FAMILIES:
        if package == "mlx_lm.models" and name in family.MODULES:
            if in_columns:
                put_in_columns(model)
            weights: DecoderWeights = family.read(model)
            # While weights were joined they were in memory twice.
            mx.clear_cache()
            return weights
    raise Unsupported(f"{name} is another architecture")


def read_head(model: Any, tensors: Mapping[str, mx.array]) -> HeadWeights:
    """The weights of the head of such a model, by its tensors, named within it: as they were published, or as mlx-lm
    converts them. Raises Unsupported."""
    model = getattr(model, "language_model", model)
    package, _, name = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or name not in HEAD_FORMS:
        raise Unsupported(f"heads of {name} are not read")
    return heads.read(model, HEAD_FORMS[name], tensors)


def read_drafter_weights(
    reader: str, config: Mapping[str, Any], tensors: Mapping[str, mx.array], model: DecoderWeights
) -> AnyWeights:
    """The weights of a drafter that looks inside a model, by its config and its tensors. Raises Unsupported."""
    if reader == "assistant":
        return assistant.read(config, tensors, model)
    if reader == "dflash":
        return dflash.read(config, tensors, model)
    return eagle3.read(config, tensors, model)
