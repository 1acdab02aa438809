"""Traits of a device for an encoder. `engine/open.py` chooses one of the three."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from zmqengine.checkpoint.encoder_batch import TOKENS_MAX_CPU, TOKENS_MAX_GPU
from zmqengine.engine.embedding import cpu
from zmqengine.engine.models import arrays


class Attention(Protocol):
    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, /, *, scale: float, mask: mx.array | None
    ) -> mx.array:
        """`mx.fast.scaled_dot_product_attention` of arrays (texts, heads, tokens, head width)."""
        ...


Activations = Callable[[str], Callable[[mx.array], mx.array]]
"""The activation that transformers calls by a name. Raises `ModelLoadError` for one that is not known."""


@dataclass(frozen=True, slots=True)
class ReplayBounds:
    """Bounds of the padding of shapes that are traced and replayed.

    `free_products`: products of numbers in a layer, of tokens with weights in float32, that take about as long as the
    host takes to launch a layer's 20 operations, 0.13 ms. `half_speed`: factor of that for weights of fewer bits.
    `fills_device`: batches that take longer than that are replayed, too.
    """

    free_products: int
    half_speed: int = 1
    fills_device: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """Operations and bounds of encoders on one device.

    `store` changes the weights of a loaded encoder to what the operations read. `tokens_max`: most tokens of a batch.
    `replays` is None where the host and the device are one and nothing is gained by a replay.
    """

    name: str
    tokens_max: int
    attention: Attention
    activations: Activations
    store: Callable[[Any], None]
    replays: ReplayBounds | None

    @property
    def is_gpu(self) -> bool:
        """Whether it computes while the host does other work."""
        return self.replays is not None


def _on_gpu(replays: ReplayBounds) -> Backend:
    attention = mx.fast.scaled_dot_product_attention
    return Backend("gpu", TOKENS_MAX_GPU, attention, arrays.activation, lambda _: None, replays)


CPU = Backend("cpu", TOKENS_MAX_CPU, cpu.attention, cpu.activation, cpu.store, None)
# A small GPU of Apple has 5 TFLOP/s. Not tried.
METAL = _on_gpu(ReplayBounds(300_000_000))
# An H100 has 67 TFLOP/s in float32; tensor cores make 990 at best, and seldom more than half of it. A shape that is
# new costs more than padding there: MLX makes new graphs and finds no freed buffers.
CUDA = _on_gpu(ReplayBounds(4_000_000_000, half_speed=8, fills_device=True))
