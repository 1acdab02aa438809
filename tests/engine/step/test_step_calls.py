"""Calls of our own Python functions in a steady greedy decode step, with the options that a worker has by default.

The step is traced, as on a GPU, where the host must be ahead of the device.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

import zmqengine
from tests.support.calls import profiled
from tests.support.engines import make_engine
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.decoder_weights import read_weights
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.speculation.build import open_speculator

OURS = str(Path(zmqengine.__file__).parent)
# Polls of the sources of drafts included: one step in eight has one.
STEPS = 32
BOUNDS = {1: 60, 8: 80, 32: 120}


class NeverRepeating:
    """The model of a worker, made to say 5x + 7 modulo 256 after x: no step verifies drafts."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers

    def make_cache(self) -> Any:
        return self._model.make_cache()

    def __call__(self, inputs: mx.array, **options: Any) -> mx.array:
        logits = self._model(inputs, **options)
        said = (inputs * 5 + 7) % 256
        return logits + 1000.0 * (mx.arange(logits.shape[-1]) == said[..., None])


def calls_of_a_step(engine: Any) -> Counter[str]:
    """Calls by function of some steps."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            calls[f"{code.co_filename[len(OURS) + 1 :]}:{code.co_name}"] += 1

    with profiled(count):
        for _ in range(STEPS):
            engine.next()
    return calls


@pytest.mark.parametrize("rows", BOUNDS)
def test_a_steady_greedy_step_makes_few_calls(model: Any, rows: int) -> None:
    """Of a model of two layers, in each of which the forward pass calls the KV cache."""
    options = {"prefill_ms": 200, "prefill_chunk": 2048}
    speculator = open_speculator("auto", VOCAB_SIZE)
    decoder = DecoderModel(read_weights(model), PlainOps())
    engine = make_engine(NeverRepeating(decoder), speculator=speculator, rows_max=32, **options)
    assert engine.insert([RowRequest(row, [1 + row, 2, 3], 200) for row in range(rows)]) == []
    for _ in range(40):
        engine.next()
    before = engine.stats()
    calls = calls_of_a_step(engine)
    assert engine.stats().generated_tokens - before.generated_tokens == rows * STEPS
    per_step = calls.total() / STEPS
    caches = sum(count for name, count in calls.items() if name.startswith("engine/kv/")) / STEPS
    print(f"{rows} rows: {per_step:.0f} calls a step, {caches:.0f} of them in engine/kv")
    for name, count in calls.most_common(60):
        print(f"  {count / STEPS:6.2f} {name}")
    assert per_step <= BOUNDS[rows]
