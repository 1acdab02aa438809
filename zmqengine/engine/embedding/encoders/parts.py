"""The contract of encoders, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.errors import ModelLoadError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Layers that attend to all tokens and to a window, by transformers' names."""


class Encoder(Protocol):
    """A model whose layers can be run one by one: `start`, each of `layers`, `finish`. States are (tokens, width)."""

    layers: list[Callable[[Any, TextBatch], Any]]

    def start(self, batch: TextBatch) -> mx.array:
        """States before the first layer."""
        ...

    def finish(self, states: mx.array) -> mx.array:
        """Hidden states, from those after the last layer."""
        ...


class Scorer(Encoder, Protocol):
    """An encoder with a head for scores."""

    def score(self, hidden: mx.array, batch: TextBatch) -> mx.array:
        """Logits (texts, labels) of the head."""
        ...


def layer_kind(config: dict[str, Any], index: int, older: str) -> str:
    """`FULL` or `SLIDING`, as the config says of each layer; `older` where it gives a pattern only."""
    names = config.get("layer_types")
    return str(names[index]) if names else older


def rotary_base(config: dict[str, Any], kind: str, older: float) -> float:
    """The base of the rotary positions of layers of one kind, `older` where the config has no `rope_parameters`.

    Raises `ModelLoadError` for positions that are scaled.
    """
    parameters = config.get("rope_parameters") or {}
    named = parameters.get(kind) or (parameters if "rope_theta" in parameters else {})
    scaling = config.get("rope_scaling") or {}
    for rotary in (
        named.get("rope_type", "default"),
        scaling.get("rope_type", scaling.get("type", "default")),
    ):
        if rotary != "default":
            raise ModelLoadError(
                f"config.json: rotary positions of the type {rotary!r} are not supported here"
            )
    return float(named.get("rope_theta", older))


def rotated(states: mx.array, base: float) -> mx.array:
    """Queries or keys (texts, heads, tokens, head width) with the rotary positions of their tokens."""
    return mx.fast.rope(states, states.shape[-1], traditional=False, base=base, scale=1.0, offset=0)


def embedded(
    batch: TextBatch,
    norm: LayerNorm,
    word: Module,
    token_type: Module | None = None,
    position: Module | None = None,
    first_position: int = 0,
) -> mx.array:
    """The sum of what tokens, parts of a pair and positions are embedded as, normalised.

    `first_position`: the row of the positions for a text's first token.
    """
    states = word(batch.ids)
    if position is not None:
        states = states + position(batch.positions + first_position if first_position else batch.positions)
    if token_type is not None:
        types = batch.types
        if types is None or token_type.weight.shape[0] == 1:
            # A view of the row needs no look-up on the device.
            is_plain = type(token_type) is Embedding
            states = states + (token_type.weight[:1] if is_plain else token_type(mx.zeros((1,), mx.int32)))
        else:
            states = states + token_type(types)
    made: mx.array = norm(states)
    return made
