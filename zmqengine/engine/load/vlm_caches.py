"""The caches of a language model of mlx-vlm: mlx-lm's, if it computes the same with them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.models.mlx_vlm import VlmText

_CALLS = ([1, 2, 3, 4, 5], [6], [7])


def choose_caches(model: VlmText) -> None:
    """Take mlx-lm's caches if the logits with them are those with mlx-vlm's. Runs the model."""
    model.own_caches = True
    own = _logits(model)
    model.own_caches = False
    try:
        same = all(map(differ_by_rounding, own, _logits(model)))
    except Exception:  # noqa: BLE001 - whatever it raises, it is not to be done
        same = False
    model.own_caches = not same


def _logits(model: VlmText) -> list[np.ndarray]:
    """Logits of a prompt and of two tokens behind it."""
    caches = model.make_cache()
    return [
        np.array(model(mx.array([tokens], mx.uint32), cache=caches)[0].astype(mx.float32))
        for tokens in _CALLS
    ]
