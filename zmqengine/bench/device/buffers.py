"""Command buffers: the same work with each bound on their operations and their size.

MLX commits a buffer after `MLX_MAX_OPS_PER_BUFFER` operations, or once its new inputs have more than
`MLX_MAX_MB_PER_BUFFER` times 2^20 elements, whichever comes first (mlx/backend/metal/device.cpp). It reads both once,
so each pair has a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

import mlx.core as mx

from zmqengine.bench.device.driving import measured_model, opened, prompt_of, run
from zmqengine.bench.device.verdict import Verdict
from zmqengine.python_child import python_command, python_environment

OPERATIONS, MEGABYTES = (50, 200, 400), (50, 200, 100_000)
"""About MLX's own choice for the larger chips, the engine's operations on M1 to M4, and what others use; the last size
is no bound."""
PAIR_S = 30.0
"""Time-out of one pair, the start of its process and its first kernels included."""
_ROWS, _TOKENS, _PROMPT_TOKENS = 8, 32, 1000


def check(directory: Path) -> Iterator[Verdict]:
    """Decode steps of one row and of eight, and prefill, for each pair of bounds; one pair where no device has them."""
    pairs = [*product(OPERATIONS, MEGABYTES)]
    model = measured_model(directory)
    for operations, megabytes in pairs if mx.metal.is_available() else pairs[:1]:
        name = f"{operations} operations, {megabytes} MB"
        bounds = {"MLX_MAX_OPS_PER_BUFFER": str(operations), "MLX_MAX_MB_PER_BUFFER": str(megabytes)}
        try:
            ended = subprocess.run(
                python_command("zmqengine.bench.device.buffers", str(model)),
                env=python_environment(bounds),
                capture_output=True,
                text=True,
                timeout=PAIR_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            yield Verdict(name, None, f"not done in {PAIR_S:.0f} s")
            continue
        if ended.returncode:
            # A bound that the device does not bear is a result.
            last = ended.stderr.strip().splitlines()[-1:] or [""]
            yield Verdict(name, None, f"ended with code {ended.returncode}: {last[0][:200]}")
            continue
        figures = json.loads(ended.stdout)
        yield Verdict(
            name, None, "; ".join(f"{what}: {value:.2f}" for what, value in figures.items()), figures
        )


def measure(model: Path) -> dict[str, float]:
    """Milliseconds of a decode step, by rows, and tokens of prefill a second."""
    engine = opened(model).engine
    vocab_size = engine.info.vocab_size
    measured = {}
    for rows in (1, _ROWS):
        prompts = [prompt_of(20, vocab_size, row) for row in range(rows)]
        # Kernels are compiled in the first run.
        run(engine, prompts, 8)
        measured[f"ms a step of {rows} {'row' if rows == 1 else 'rows'}"] = 1000 * median(
            run(engine, prompts, _TOKENS).step_s
        )
    run(engine, [prompt_of(_PROMPT_TOKENS, vocab_size, 20)], 1)
    prefill_s = sum(run(engine, [prompt_of(_PROMPT_TOKENS, vocab_size, 21)], 1).step_s)
    measured["tokens/s of a prompt"] = _PROMPT_TOKENS / prefill_s
    engine.close()
    return measured


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
