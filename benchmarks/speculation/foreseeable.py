"""Makes a model's output predictable, at unchanged cost."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from zmqengine.errors import ConfigError


def make_foreseeable(model: Any) -> None:
    """Change `model`, one of mlx-lm with weights of full width: from now on each token is followed by the next of the
    vocabulary, or by itself where the words read are the words said.

    Every layer computes as before and adds nothing. The likeliest token stands clear of all others, so that no
    rounding, as kernels of other widths have, makes another text.
    """
    embedding, head = model.model.embed_tokens, getattr(model, "lm_head", None)
    if not isinstance(embedding, Embedding) or not (head is None or isinstance(head, Linear)):
        raise ConfigError(
            "drafts of a set quality need a model with weights of full width, not quantised ones"
        )
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.weight = mx.zeros_like(module.weight)
    if head is not None:
        head.weight = mx.concatenate([embedding.weight[-1:], embedding.weight[:-1]])
    mx.eval(model.parameters())
