"""The fastest variant of the draw, for one size of vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from zmqengine.engine.autotune.saved_choices import SavedChoices
from zmqengine.engine.autotune.variants import fastest
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import SAMPLED, Draw

# Rows of the measured batch: with few the draw takes too little of a step to matter.
_ROWS = 32
# Least share of equal tokens: rounding decides about one whose weight is next to a threshold.
_ALIKE_MIN = 0.9


def choose_draw(vocab_size: int, draws: Mapping[str, Draw], dtype: mx.Dtype, saved: SavedChoices) -> str:
    """The name of the fastest of `draws`, for logits [rows, vocab_size] of `dtype`."""
    # Its name in the saved choices.
    name = f"drawing from {vocab_size} words"
    best = saved.choices.get(name, "")
    if best not in draws:
        best = _fastest(vocab_size, draws, dtype)
        saved.keep({name: best})
    return best


def _fastest(vocab_size: int, draws: Mapping[str, Draw], dtype: mx.Dtype) -> str:
    logits = (mx.random.normal((_ROWS, vocab_size)) * 2).astype(dtype)
    rows = [
        Row(RowRequest(row=index, prompt=[0], max_tokens=2, sampling=SAMPLED[0], seed=index), vocab_size, 4)
        for index in range(_ROWS)
    ]
    mx.eval(logits)

    def timed(draw: Draw) -> Callable[[], mx.array]:
        plan = draw.plan(rows, vocab_size)
        return lambda: plan.draw(logits)[0]

    return fastest({name: timed(draw) for name, draw in draws.items()}, agree=_mostly_alike).best


def _mostly_alike(got: mx.array, wanted: mx.array) -> bool:
    # Rounding decides about a token whose weight is next to a threshold.
    alike: Any = (got == wanted).astype(mx.float32).mean().item()
    return bool(alike >= _ALIKE_MIN)
