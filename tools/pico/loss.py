"""What training makes smaller: the loss over the tokens that a model should learn to say."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from tools.pico.batches import Batch, batches
from tools.pico.corpus import Document


def loss(model: Any, inputs: mx.array, places: mx.array, targets: mx.array) -> mx.array:
    """The mean over one batch, in nats."""
    hidden = model.model(inputs)
    learnt = hidden.reshape(-1, hidden.shape[-1])[places]
    logits = model.model.embed_tokens.as_linear(learnt)
    return nn.losses.cross_entropy(logits, targets, reduction="mean")


def arrays(batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
    """A batch as `loss` takes it."""
    return mx.array(batch.inputs), mx.array(batch.places), mx.array(batch.targets)


def mean_loss(model: Any, tokenizer: Tokenizer, documents: list[Document], context_tokens: int) -> float:
    """The mean over every learnt token of `documents`, cut at `context_tokens`, in nats."""
    total, count = 0.0, 0
    for batch in batches(documents, tokenizer, 4096, context_tokens):
        value: Any = loss(model, *arrays(batch)).item()
        total += value * len(batch.targets)
        count += len(batch.targets)
    return total / count
