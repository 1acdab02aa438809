"""mlx-lm's `BatchGenerator` in a process of its own, without a server: the upper bound of throughput.

`python -m zmqengine.bench.servers.bare_generator MODEL_DIRECTORY [ROWS]`. In: lines with a BareJob. Out: a line once
the model is loaded, then a line with a BareResult for each job.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from zmqengine.engine.host.blas import load_tuned_blas

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator


ROWS = 32
"""Rows of the generator by default."""


class BareJob(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop of `streams` rows over `prompts`: when a row ends, the next prompt is inserted."""

    prompts: list[list[int]]
    max_tokens: int
    streams: int


class BareResult(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens generated, the time from the first insert to the last token, and steps of the generator."""

    tokens: int
    wall_s: float
    steps: int


def run_job(generator: BatchGenerator, job: BareJob) -> BareResult:
    """Run one job on an empty generator."""
    waiting = deque(job.prompts)
    started_s = time.perf_counter()
    running = _insert(generator, waiting, job.streams, job.max_tokens)
    tokens = steps = 0
    while running:
        _, responses = generator.next()  # type: ignore[no-untyped-call]
        steps += 1
        ended = 0
        for response in responses:
            tokens += 1
            ended += response.finish_reason is not None
        if ended:
            running += _insert(generator, waiting, ended, job.max_tokens) - ended
    return BareResult(tokens=tokens, wall_s=time.perf_counter() - started_s, steps=steps)


def _insert(generator: BatchGenerator, waiting: deque[list[int]], count: int, max_tokens: int) -> int:
    prompts = [waiting.popleft() for _ in range(min(count, len(waiting)))]
    if prompts:
        generator.insert(prompts, [max_tokens] * len(prompts))
    return len(prompts)


def main() -> None:
    """Load the model, then run jobs until standard input ends."""
    blas = load_tuned_blas()

    import mlx_lm
    from mlx_lm.generate import BatchGenerator

    model, _ = mlx_lm.load(sys.argv[1])[:2]
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    generator = BatchGenerator(model, stop_tokens=[], completion_batch_size=rows or ROWS)
    print(blas, flush=True)
    for line in sys.stdin:
        result = run_job(generator, msgspec.json.decode(line, type=BareJob))
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
