"""Times of single steps: verify blocks, pieces of prompts by their length, and a prompt in chunks of several sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from zmqengine.bench.device.driving import measured_model, opened, prompt_of
from zmqengine.bench.device.verdict import Verdict
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import PLAIN_DRAW
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.step.width_costs import measure_costs

WIDTHS = (2, 3, 4, 6, 8)
PIECES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CHUNKS = (256, 512, 1024, 2048)
_ROWS = 8
_REPEATS = 3
_GPU_TOKENS, _CPU_TOKENS = 4096, 512


def check(directory: Path) -> Iterator[Verdict]:
    """Costs of verify blocks relative to a plain step, milliseconds of pieces, tokens a second of chunks."""
    found = opened(measured_model(directory))
    runner, vocab_size = found.runner, found.engine.info.vocab_size
    yield from _verify_blocks(runner, vocab_size)
    tokens_max = _GPU_TOKENS if on_gpu() else _CPU_TOKENS
    pieces = {}
    for size in (size for size in PIECES if size <= tokens_max):
        # The first has kernels to compile.
        pieces[str(size)] = 1000 * min(_read_s(runner, vocab_size, size, size) for _ in range(_REPEATS))
    yield Verdict("pieces of prompts", None, _in_words(pieces, "ms"), pieces)
    chunks = {}
    for size in (size for size in CHUNKS if size < tokens_max):
        seconds = min(_read_s(runner, vocab_size, tokens_max, size) for _ in range(2))
        chunks[str(size)] = tokens_max / seconds
    yield Verdict("chunks", None, f"a prompt of {tokens_max}: {_in_words(chunks, 'tokens/s')}", chunks)
    found.engine.close()


def _verify_blocks(runner: ModelRunner, vocab_size: int) -> Iterator[Verdict]:
    costs = WidthCosts()
    measure_costs(
        runner,
        PLAIN_DRAW,
        costs,
        vocab_size=vocab_size,
        rows_max=_ROWS,
        widths=WIDTHS,
        positions_max=_ROWS * WIDTHS[-1],
        is_gpu=False,
    )
    runner.clear()
    for rows, seconds in costs.seconds.items():
        plain_s = seconds.get(1)
        if plain_s is None:
            continue
        ratios = {str(width): seconds[width] / plain_s for width in WIDTHS if width in seconds}
        text = f"a step takes {1000 * plain_s:.2f} ms; {_in_words(ratios, 'steps')}"
        yield Verdict(f"verify blocks, rows: {rows}", None, text, ratios)


def _read_s(runner: ModelRunner, vocab_size: int, tokens: int, size: int) -> float:
    """Seconds to read a prompt in pieces of one size."""
    row = Row(RowRequest(0, prompt_of(tokens, vocab_size)), vocab_size, tokens + 1)
    row.cache = runner.open(tokens)
    started_s = time.perf_counter()
    for start in range(0, tokens, size):
        part = row.tokens[start : start + size]
        outputs = runner.forward([RowPiece(row, start, len(part))], mx.array(part, mx.uint32), 1)
        mx.eval(outputs.marker)
        row.computed_tokens += len(part)
    seconds = time.perf_counter() - started_s
    row.cache.close(is_finite=True)
    return seconds


def _in_words(figures: dict[str, float], unit: str) -> str:
    return f"{', '.join(f'{name}: {value:.3g}' for name, value in figures.items())} {unit}"
