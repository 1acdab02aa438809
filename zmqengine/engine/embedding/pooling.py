"""From the hidden states of a batch of texts to vectors."""

from __future__ import annotations

import mlx.core as mx

from zmqengine.engine.embedding.text_batch import TextBatch


def pool(hidden: mx.array, batch: TextBatch, pooling: str) -> mx.array:
    """One state of float32 for each text."""
    pools = {"cls": batch.first, "last": batch.last, "mean": batch.mean, "max": batch.most}
    return pools[pooling](hidden).astype(mx.float32)
