"""Shapes of models of Llama's and Qwen3-MoE's architecture, from a trivial one to 8B parameters."""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Widths and depths. `dtype` is that of the weights on disk; `words` of the vocabulary have a text.

    With `experts` a layer has as many of width `intermediate`, of which each token takes `experts_used`.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context_tokens: int = 16384
    dtype: str = "float32"
    words: int = 8192
    experts: int = 0
    experts_used: int = 0

    @property
    def parameters(self) -> int:
        """The number of weights, embedding and head included, which are not tied."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + max(1, self.experts) * 3 * self.hidden * self.intermediate + 2 * self.hidden
        if self.experts:
            layer += self.experts * self.hidden + 2 * head
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


# 0.2m measures the host alone. 0.5b and 8b have the layers of Qwen2.5-0.5B and Llama-3.1-8B.
SHAPES: dict[str, ModelShape] = {
    "0.2m": ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocabulary=1024),
    # The depth of large models with trivial layers: measures the host's work for a step.
    "deep": ModelShape(hidden=64, layers=36, heads=4, kv_heads=2, intermediate=128, vocabulary=1024),
    "1m": ModelShape(hidden=128, layers=4, heads=4, kv_heads=2, intermediate=256, vocabulary=2048),
    "25m": ModelShape(hidden=512, layers=5, heads=8, kv_heads=4, intermediate=1408, vocabulary=8192),
    "150m": ModelShape(hidden=1024, layers=11, heads=16, kv_heads=8, intermediate=2816, vocabulary=8192),
    # The vocabulary of large models, to measure work for each token of it.
    "128k": ModelShape(
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=704,
        vocabulary=128_256,
        words=128_000,
    ),
    "0.5b": ModelShape(
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        intermediate=4864,
        vocabulary=151_936,
        dtype="bfloat16",
    ),
    "8b": ModelShape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        intermediate=14336,
        vocabulary=128_256,
        dtype="bfloat16",
    ),
    # As many parameters, of which a token takes a sixth.
    "moe": ModelShape(
        hidden=2048,
        layers=24,
        heads=16,
        kv_heads=4,
        intermediate=768,
        vocabulary=128_256,
        dtype="bfloat16",
        experts=64,
        experts_used=8,
    ),
}
