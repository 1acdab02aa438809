"""From the hidden states of a batch of texts to vectors."""

from __future__ import annotations

import mlx.core as mx

from zmqengine.engine.embedding.packing import Packed


def pool(hidden: mx.array, packed: Packed, pooling: str) -> mx.array:
    """One state of float32 for each text."""
    pools = {"cls": packed.first, "last": packed.last, "mean": packed.mean, "max": packed.most}
    return pools[pooling](hidden).astype(mx.float32)
