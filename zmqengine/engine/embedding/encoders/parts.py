"""The contract of encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from zmqengine.engine.embedding.packing import Packed


class Encoder(Protocol):
    """A model whose layers can be run one by one: `start`, each of `layers`, `finish`.

    States are arrays (tokens, width). `labels` is 0 without a head for scores.
    """

    layers: list[Callable[[mx.array, Packed], mx.array]]
    labels: int

    def start(self, packed: Packed) -> mx.array:
        """States before the first layer."""
        ...

    def finish(self, states: mx.array) -> mx.array:
        """Hidden states, from those after the last layer."""
        ...

    def score(self, hidden: mx.array, packed: Packed) -> mx.array:
        """Logits (texts, labels) of the head."""
        ...
