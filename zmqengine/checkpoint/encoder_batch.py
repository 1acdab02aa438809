"""Memory of a batch of texts in an encoder, by its config: what the engine bounds, and a launcher reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKENS_MAX_CPU, TOKENS_MAX_GPU = 2048, 16_384
"""Tokens of a batch. More gain nothing: products of this height use the whole device."""
SCORES_BYTES_MAX = 256 << 20
"""Attention scores that exist at once where the device computes them all: longer texts are cut by queries. A GPU has
kernels that do not, but not all have one for float32."""


def batch_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Bytes of a batch of `tokens`: their states in a layer, in float32, and attention scores."""
    floats = 8 * int(config["hidden_size"]) + 3 * int(config.get("intermediate_size", 0))
    return tokens * 4 * floats + SCORES_BYTES_MAX
