"""Margins: the longest steps of the engine against the 5 s after which macOS ends a command buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zmqengine.bench.device.driving import measured_model, opened, prompt_of, run
from zmqengine.bench.device.verdict import Verdict
from zmqengine.engine.host.backend import on_gpu

WATCHDOG_S = 5.0
_LONGEST_S = WATCHDOG_S / 2
_GPU_TOKENS, _CPU_TOKENS = 15_000, 1500


def check(directory: Path) -> Iterator[Verdict]:
    """The longest step while a long prompt is read at default options, is restored, and while others decode."""
    tokens = _GPU_TOKENS if on_gpu() else _CPU_TOKENS
    model = measured_model(directory)
    engine = opened(model).engine
    # Compiling kernels takes the host's time, not the device's.
    run(engine, [prompt_of(tokens, engine.info.vocab_size, 5)], 2)
    prompt = prompt_of(tokens, engine.info.vocab_size)
    for name in ("reading", "restoring"):
        ran = run(engine, [prompt], 2)
        yield _verdict(f"{name} {tokens} tokens", max(ran.step_s))
    others = [prompt_of(50, engine.info.vocab_size, row) for row in range(1, 8)]
    ran = run(engine, [*others, prompt_of(tokens, engine.info.vocab_size, 9)], 100)
    yield _verdict(f"reading {tokens} tokens beside 7 streams", max(ran.step_s))
    engine.close()


def _verdict(name: str, longest_s: float) -> Verdict:
    # A step holds several command buffers: one of them is shorter.
    text = f"the longest step took {longest_s:.3f} s, {WATCHDOG_S / longest_s:.0f} times less than the watchdog's 5 s"
    return Verdict(name, longest_s < _LONGEST_S, text)
