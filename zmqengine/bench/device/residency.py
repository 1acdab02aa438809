"""Wired and unwired: the same work with each choice of `--wired-limit` that is safe."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import mlx.core as mx

from zmqengine.bench.device.driving import measured_model, opened, prompt_of, run
from zmqengine.bench.device.verdict import Verdict

_ROWS, _TOKENS = 4, 64


def check(directory: Path) -> Iterator[Verdict]:
    """Speed and memory with the weights wired and with nothing wired; never with more, which can make macOS panic."""
    model = measured_model(directory)
    yield _measure(model, "weights")
    yield _measure(model, "off")


def _measure(model: Path, limit: str) -> Verdict:
    mx.reset_peak_memory()
    engine = opened(model, wired_limit=limit).engine
    prompts = [prompt_of(300, engine.info.vocab_size, row) for row in range(_ROWS)]
    held: list[int] = []

    def note() -> None:
        held.append(mx.get_active_memory() + mx.get_cache_memory())

    run(engine, prompts, _TOKENS)
    ran = run(engine, prompts, _TOKENS, after_step=note)
    # What MLX has from the system: with each change buffers enter or leave the residency set.
    changes = sum(one != other for one, other in pairwise(held))
    wired = engine.wired.description or "not Metal: nothing is wired"
    step_ms = 1000 * median(ran.step_s)
    text = (
        f"{wired}; {step_ms:.2f} ms a step of {_ROWS} rows, peak {engine.memory().peak >> 20} MiB, "
        f"{changes} of {len(held)} steps took or gave back memory"
    )
    engine.close()
    return Verdict(f"--wired-limit {limit}", None, text, {f"ms a step of {_ROWS} rows": step_ms})
