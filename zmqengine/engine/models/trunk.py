"""Last hidden states of models that generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def trunk_of(model: Any) -> Callable[..., Any]:
    """The part of a language model that ends with its last norm, before the product that makes logits.

    Raises `AttributeError` for a model that has none under the usual names.
    """
    owner = getattr(model, "language_model", model)
    for name in ("model", "transformer", "backbone"):
        trunk = getattr(owner, name, None)
        if callable(trunk):
            return trunk  # type: ignore[no-any-return]
    raise AttributeError("no layers apart from the logits")
