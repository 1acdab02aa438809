"""Positions up to 8,192, and gaps in them: a short text teaches to read what stands thousands of tokens before.

The method is known as positional skip-wise training (Zhu et al., "PoSE", 2023).
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

CONTEXT_TOKENS = 8192

# Slow rotations become 32 times slower, fast ones stay: neighbours are told apart as before, and 8,192 tokens turn
# the slow ones no further than 256 tokens did in pico.
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


class _GapRope:
    """Rotates as `rope` does, with every position from `start` on moved by `distance`."""

    def __init__(self, rope: Any) -> None:
        self._rope = rope
        self.start = 0
        self.distance = 0

    def __call__(self, x: mx.array) -> mx.array:
        """`x` has the shape (rows, heads, length, head size)."""
        if not self.distance:
            return self._rope(x)  # type: ignore[no-any-return]
        near = self._rope(x[:, :, : self.start])
        far = self._rope(x[:, :, self.start :], offset=self.start + self.distance)
        return mx.concatenate([near, far], axis=2)


class Gaps:
    """Draws a gap for a `share` of the batches: anywhere in it, as long as fits into `context_tokens`."""

    def __init__(self, ropes: list[_GapRope], context_tokens: int, share: float, seed: int) -> None:
        self._ropes = ropes
        self._share = share
        self._context_tokens = context_tokens
        self._random = random.Random(seed)

    def draw(self, length: int) -> None:
        """The gap for the next batch, of rows of `length` tokens."""
        start, distance = 0, 0
        room = self._context_tokens - length
        if self._random.random() < self._share and length > 2 and room > 0:
            start = self._random.randrange(1, length)
            distance = round(room ** self._random.uniform(0.3, 1.0))
        for rope in self._ropes:
            rope.start, rope.distance = start, distance


@contextmanager
def gaps(model: Any, context_tokens: int, share: float, seed: int) -> Iterator[Gaps]:
    """Gaps for the batches of a model while the block runs."""
    attentions = [layer.self_attn for layer in model.model.layers]
    plain = [attention.rope for attention in attentions]
    ropes = [_GapRope(rope) for rope in plain]
    for attention, rope in zip(attentions, ropes, strict=True):
        attention.rope = rope
    try:
        yield Gaps(ropes, context_tokens, share, seed)
    finally:
        for attention, rope in zip(attentions, plain, strict=True):
            attention.rope = rope
