"""Small random models of every architecture: rows together make the tokens of a row alone, and logits are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from zmqengine.bench.device.driving import run
from zmqengine.bench.device.verdict import Verdict
from zmqengine.bench.models.small_models import ARCHITECTURES, VOCAB_SIZE, build_model
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.interface import ModelInfo
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.open import find_ops
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine

_HEAD = [1 + place * 7 % 300 for place in range(100)]
_PROMPTS = ([*_HEAD], [*_HEAD[:90], 5, 9, 2], [3, 1, 4])
_TOKENS = 8


def check(directory: Path) -> Iterator[Verdict]:
    """One verdict for each architecture."""
    for name, config in ARCHITECTURES.items():
        try:
            yield _check(name, build_model(config))
        except Exception as error:  # noqa: BLE001 - a model that raises is a finding
            yield Verdict(name, False, f"{type(error).__name__}: {error}"[:300])


def _check(name: str, model: Any) -> Verdict:
    wanted = [_alone(model, prompt) for prompt in _PROMPTS]
    info = ModelInfo(name, VOCAB_SIZE, 2048, frozenset(), 0)
    runner = open_model(model, *find_ops(), context_tokens=info.context_tokens).runner
    engine = MlxEngine(runner, info, EngineOptions(prefill_ms=0))
    try:
        turns = []
        for _ in range(2):
            if engine.rows_max > 1:
                turns.append(list(run(engine, _PROMPTS, _TOKENS).tokens.values()))
            else:
                turns.append([run(engine, [prompt], _TOKENS).tokens[0] for prompt in _PROMPTS])
    finally:
        engine.close()
    logits = _logits(model)
    device = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        is_rounding = differ_by_rounding(logits, _logits(model))
    finally:
        mx.set_default_device(device)
    faults = [] if is_rounding else ["logits are not the CPU's"]
    faults += [f"turn {at + 1}: other tokens than alone" for at, turn in enumerate(turns) if turn != wanted]
    return Verdict(name, not faults, "; ".join(faults) or "the same tokens, twice, and the CPU's logits")


def _alone(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens by mlx-lm's own model and caches."""
    caches = make_prompt_cache(model)
    inputs, found = mx.array([prompt]), []
    for _ in range(_TOKENS):
        token = mx.argmax(model(inputs, cache=caches)[:, -1], axis=-1)
        found.append(cast(int, token.item()))
        inputs = token[:, None]
    return found


def _logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([_HEAD]))[0, -1].astype(mx.float32))
