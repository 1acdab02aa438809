"""Pauses: the power assertion, and the first token after a pause with and without a GPU that is kept warm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from zmqengine.bench.device.driving import measured_model, opened, prompt_of, run
from zmqengine.bench.device.verdict import Verdict
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.worker.process.memory_pressure import pressure_source
from zmqengine.worker.process.power import power_assertion

_PAUSE_S = 3.0
_REPEATS = 3


def check(directory: Path) -> Iterator[Verdict]:
    """The assertion and the memory pressure as the system tells them; milliseconds of a token after a pause."""
    yield _assertion()
    yield Verdict("memory pressure", None, pressure_source()())
    model = measured_model(directory)
    engine = opened(model).engine
    prompt = prompt_of(20, engine.info.vocab_size)
    run(engine, [prompt], 50)
    at_once = median(_first_s(engine, prompt) for _ in range(_REPEATS))
    cold = median(_after_pause_s(engine, prompt, warm=False) for _ in range(_REPEATS))
    warm = median(_after_pause_s(engine, prompt, warm=True) for _ in range(_REPEATS))
    needs = engine.keep_warm()
    engine.close()
    figures = {
        "ms at once": 1000 * at_once,
        "ms after a pause": 1000 * cold,
        "ms kept warm": 1000 * warm,
    }
    text = f"{1000 * at_once:.1f} ms at once, {1000 * cold:.1f} after {_PAUSE_S:.0f} s, {1000 * warm:.1f} kept warm"
    # Elsewhere the pauses are as long with the product that keeps a GPU warm as without it.
    yield Verdict(
        "first tokens after a pause",
        None,
        text if needs else f"{text} (this device is never kept warm)",
        figures if needs else {},
    )


def _assertion() -> Verdict:
    assertion = power_assertion(wanted=True)
    assertion.hold()
    assertion_state, listed = assertion.description, _listed()
    assertion.release()
    if sys.platform != "darwin":
        return Verdict("power assertion", None, f"{assertion_state}; {listed or 'not listed here'}")
    return Verdict(
        "power assertion",
        bool(listed) and not _listed(),
        f"{assertion_state}; pmset: {listed or 'not listed'}",
    )


def _listed() -> str:
    """The line of `pmset -g assertions` that is ours."""
    pmset = shutil.which("pmset")
    if pmset is None:
        return ""
    assertion_state = subprocess.run(
        [pmset, "-g", "assertions"], capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line.strip() for line in assertion_state.stdout.splitlines() if f"pid {os.getpid()}(" in line]
    return lines[0] if lines else ""


def _first_s(engine: MlxEngine, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    run(engine, [prompt], 2)
    return time.perf_counter() - started_s


def _after_pause_s(engine: MlxEngine, prompt: list[int], *, warm: bool) -> float:
    until_s = time.monotonic() + _PAUSE_S
    while time.monotonic() < until_s:
        time.sleep(0.5)
        if warm:
            engine.keep_warm()
    return _first_s(engine, prompt)
