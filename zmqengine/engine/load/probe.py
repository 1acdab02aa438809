"""Probes a model of mlx-lm when an engine opens.

Some of mlx-lm's models raise when rows are batched, or compute them wrongly. Each of them is still served, one row at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.host.device_memory import padding_allowance
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models import mlx_lm_caches as caches_of
from zmqengine.engine.models.mlx_lm_blocks import MlxLmBlocks
from zmqengine.engine.models.mlx_lm_runner import MlxLmRunner
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.row import Row

# Three rows of unlike lengths: what is right for two by chance is not for three. Every vocabulary has these ids.
ROWS = [[1, 2, 3, 4, 5], [3, 2], [5, 1, 4]]
_MEASURED_TOKENS = 64


def open_runner(model: Any, parameter_bytes: int = 0) -> MlxLmRunner:
    """The runner of a model of mlx-lm, by what it can do. Raises what the model raises for one row."""
    return probe(model, parameter_bytes)[0]


def probe(model: Any, parameter_bytes: int = 0) -> tuple[MlxLmRunner, list[np.ndarray]]:
    """The runner of a model of mlx-lm, and its logits of `ROWS`, row by row, as `steps_of` gives them."""
    caches = caches_of.new_caches(model)
    mx.eval(model(mx.array([ROWS[0][:-1]]), cache=caches), caches_of.arrays(caches))
    shape = caches_of.measure_caches(caches)

    padding_bytes_max = padding_allowance(parameter_bytes)

    def runner(*, batches: bool, blocks: MlxLmBlocks | None = None, reason: str = "") -> MlxLmRunner:
        return MlxLmRunner(model, shape, blocks, reason, batches=batches, padding_bytes_max=padding_bytes_max)

    alone = steps_of(runner(batches=False), together=False)
    batches = caches_of.can_merge(caches) and _agrees(
        alone, lambda: steps_of(runner(batches=True), together=True)
    )
    blocks: MlxLmBlocks | None = None
    reason = ""
    try:
        blocks = MlxLmBlocks(model, caches)
        restored = steps_of(runner(batches=False, blocks=blocks), together=False, restores=True)
        if not all(map(differ_by_rounding, alone, restored)):
            blocks, reason = None, "restored caches give other logits"
    except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be done
        blocks, reason = None, f"{type(error).__name__}: {error}"
    return runner(batches=batches, blocks=blocks, reason=reason), alone


def _agrees(alone: Sequence[np.ndarray], compute: Callable[[], Sequence[np.ndarray]]) -> bool:
    try:
        together = compute()
    except Exception:  # noqa: BLE001 - whatever it raises, it is not to be done
        return False
    return all(map(differ_by_rounding, alone, together))


def rows_of(prompts: Sequence[Sequence[int]]) -> list[Row]:
    """Rows with these prompts, for a runner alone."""
    return [
        Row(RowRequest(index, list(prompt), 99), 1 << 30, 1 << 20) for index, prompt in enumerate(prompts)
    ]


def steps_of(
    runner: ModelRunner,
    *,
    together: bool,
    restores: bool = False,
    widths: Sequence[int] = (1, 1),
    prompts: Sequence[Sequence[int]] = ROWS,
) -> list[np.ndarray]:
    """Logits [tokens, vocab] of each row in steps of these `widths`, after prefills of all but the last tokens.

    Every step reads the last token of a row, and again what the steps before have read. With `restores` caches are
    rebuilt from blocks after the prefill.
    """
    rows = rows_of(prompts)
    try:
        for row in rows:
            row.cache = runner.open(len(row.tokens))
            tokens = row.tokens[:-1]
            mx.eval(runner.forward([RowPiece(row, 0, len(tokens))], mx.array(tokens, mx.uint32), 1).marker)
            row.computed_tokens = len(tokens)
            if restores:
                blocks = runner.blocks
                assert blocks is not None
                half = max(1, len(tokens) // 2)
                cuts = [half, len(tokens)] if half < len(tokens) else [len(tokens)]
                parts, state = blocks.take(row.cache, 0, cuts), blocks.take_state(row.cache)
                mx.eval(parts)
                row.cache.close(is_finite=False)
                row.cache = runner.restore(parts, len(tokens), state, len(row.tokens))
        logits: list[np.ndarray] = []
        for width in widths:
            batches = [rows] if together else [[row] for row in rows]
            for batch in batches:
                logits += _step(runner, batch, width)
        return logits
    finally:
        for row in rows:
            if row.cache is not None:
                row.cache.close(is_finite=False)


def _step(runner: ModelRunner, rows: Sequence[Row], width: int) -> list[np.ndarray]:
    """Logits [width, vocab] of each row, whose first token counts as computed."""
    pieces, tokens = [], []
    for row in rows:
        pieces.append(RowPiece(row, row.computed_tokens, width, samples=width))
        tokens += [row.tokens[-1], *range(6, 5 + width)]
    outputs = runner.forward(pieces, mx.array(tokens, mx.uint32), width)
    assert outputs.logits is not None
    for row in rows:
        row.computed_tokens += 1
    return list(np.array(outputs.logits.astype(mx.float32)))


def bytes_per_token(runner: ModelRunner) -> float:
    """Transient bytes of a forward pass for each token, KV cache included, as measured for a short prompt."""
    mx.synchronize()
    row = rows_of([[1] * _MEASURED_TOKENS])[0]
    row.cache = runner.open(_MEASURED_TOKENS)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    outputs = runner.forward([RowPiece(row, 0, _MEASURED_TOKENS)], mx.array(row.tokens, mx.uint32), 1)
    mx.eval(outputs.marker, list(outputs.started))
    peak = mx.get_peak_memory()
    row.cache.close(is_finite=False)
    return max(0, peak - before) / _MEASURED_TOKENS


def hidden_width(runner: ModelRunner) -> int:
    """Floats of a last hidden state; 0 if the model does not give them."""
    (row,) = rows_of([[0, 0]])
    row.cache = runner.open(2)
    try:
        (hidden,) = runner.forward([RowPiece(row, 0, 2, pooled=True)], mx.array([0, 0], mx.uint32), 1).hidden
        mx.eval(hidden)
        tokens, width = hidden.shape
    except Exception:  # noqa: BLE001 - models are written in many ways; one without hidden states only generates
        return 0
    finally:
        row.cache.close(is_finite=False)
    return int(width) if tokens == 2 else 0
