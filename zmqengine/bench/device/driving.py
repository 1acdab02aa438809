"""Engines on models of a check, and their rows run to the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from zmqengine.bench.models.model_shapes import SHAPES
from zmqengine.bench.models.random_model import make_model
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.open import OpenedEngine, open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine

GPU_SHAPE, CPU_SHAPE = "0.5b", "1m"
"""The model of the checks that measure: the weights of a small useful one, or one that a CPU gets through."""


class Ran(NamedTuple):
    """Tokens by row, and the seconds of each step."""

    tokens: dict[int, list[int]]
    step_s: list[float]


def measured_model(directory: Path) -> Path:
    """A random model in `directory` for measurements, made by the first group of checks that needs it."""
    shape = GPU_SHAPE if on_gpu() else CPU_SHAPE
    model = directory / shape
    if not model.is_dir():
        # In a group that is cut, a model is half.
        part = directory / f"{shape}.{os.getpid()}"
        make_model(shape, SHAPES[shape], part)
        part.rename(model)
    return model


def as_on_metal() -> dict[str, Any]:
    """Options of an engine that computes as on Metal: elsewhere without the kernels of this device."""
    return {} if mx.metal.is_available() else {"kernels": "mlx"}


def opened(model: Path, **options: Any) -> OpenedEngine:
    """An engine as a worker opens it on Metal, without tuning, so that runs can be compared."""
    fixed = {"warm_up_s": 0.0, "speculate": "off", **as_on_metal()}
    return open_mlx_engine(str(model), EngineOptions(**{**fixed, **options}))


def run(
    engine: MlxEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    after_step: Callable[[], object] = lambda: None,
) -> Ran:
    """Run a row for each prompt to its end. Raises `RuntimeError` for a row that fails."""
    failures = engine.insert(
        [RowRequest(row, list(prompt), max_tokens) for row, prompt in enumerate(prompts)]
    )
    tokens: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
    step_s, running = [], set(tokens)
    while running and not failures:
        started_s = time.perf_counter()
        result = engine.next()
        step_s.append(time.perf_counter() - started_s)
        after_step()
        failures = result.failures
        for token in result.tokens:
            tokens[token.row].append(token.token)
            if token.finish is not None:
                running.discard(token.row)
    if failures:
        raise RuntimeError(failures[0].message)
    return Ran(tokens, step_s)


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt without repetitions that a cache could use."""
    return [(seed * 7919 + index * 104_729 + index * index) % vocab_size for index in range(length)]
