"""Last hidden states of models that generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from zmqengine.engine.models.decoder import DecoderModel


def trunk_of(model: Any) -> Callable[..., Any]:
    """The part of a language model that ends with its last norm, before the product that makes logits.

    Raises `AttributeError` for a model that has none under the usual names.
    """
    if isinstance(model, DecoderModel):
        return model.hidden
    owner = getattr(model, "language_model", model)
    for name in ("model", "transformer", "backbone"):
        trunk = getattr(owner, name, None)
        if callable(trunk):
            return trunk  # type: ignore[no-any-return]
    raise AttributeError("no layers apart from the logits")


def hidden_width(model: Any) -> int:
    """Floats of a last hidden state; 0 if the model does not give them."""
    try:
        states = trunk_of(model)(mx.array([[0, 0]], dtype=mx.uint32))
        mx.eval(states)
        texts, tokens, width = states.shape
    except Exception:  # noqa: BLE001 - models are written in many ways; one without hidden states only generates
        return 0
    return int(width) if (texts, tokens) == (1, 2) else 0
