"""Probes a model's abilities when an engine opens.

Some of mlx-lm's models raise when rows are batched, and some treat padding as text. Each of them is still served: one
row at a time, or only rows of one length in a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.row import Caches

# Three rows: a mask that is right for two by chance is not for three. Every vocabulary has these ids.
_ROWS = [[1, 2, 3, 4, 5], [3, 2], [5, 1, 4]]
_LENGTHS = [len(row) - 1 for row in _ROWS]
_MEASURED_TOKENS = 64


@dataclass(frozen=True)
class Abilities:
    """Abilities of a model: the shape of its caches, and whether rows can share a call (`mergeable`), padded
    (`paddable`).

    `layout`: how caches are cut into blocks of the prefix cache; None if they cannot be, for the `uncacheable_reason`.
    A model that `widens` takes several tokens of each row in one call, and its rows can roll back by unlike counts.
    """

    shape: kv.CacheShape
    layout: kv.BlockLayout | None
    uncacheable_reason: str
    mergeable: bool
    paddable: bool
    widens: bool
    read_bytes: float

    def chunk_bytes(self, tokens: int) -> int:
        """Transient bytes of a prefill of `tokens`, caches excluded, as measured for short contexts."""
        return int(tokens * self.read_bytes)


def probe(model: Any) -> Abilities:
    """Run `model` on a few tokens, one row at a time and in a batch. Raises what it raises for one row."""
    starts = [_read_alone(model, row[:-1]) for row in _ROWS]
    mergeable = all(map(kv.can_merge, starts))
    merged = kv.KVBatch.merge(starts, _LENGTHS) if mergeable else kv.KVBatch()
    alone = [
        _last_logits(model, [row[-1:]], kv.KVBatch(start, [len(row) - 1]))[0]
        for row, start in zip(_ROWS, starts, strict=True)
    ]
    mergeable = mergeable and _agrees(model, lambda: merged, alone)
    paddable = mergeable and _agrees(model, lambda: _read_padded(model), alone)
    widens = mergeable and merged.can_roll_back and _agrees(model, lambda: _read_and_go_back(model), alone)
    layout, uncacheable_reason = _layout(model, alone[0])
    shape = kv.measure_caches(starts[0])
    return Abilities(shape, layout, uncacheable_reason, mergeable, paddable, widens, _measure_reading(model))


def _layout(model: Any, alone: np.ndarray) -> tuple[kv.BlockLayout | None, str]:
    """The block layout, if restored caches give the logits `alone`; else None and the reason."""
    row = _ROWS[0]
    try:
        caches = _read_alone(model, row[:-1])
        layout = kv.BlockLayout(caches)
        parts = layout.take(caches, 0, [2, len(row) - 1])
        again = layout.build(model, parts, len(row) - 1, layout.take_state(caches))
        kept = _last_logits(model, [row[-1:]], kv.KVBatch(again, [len(row) - 1]))[0]
    except Exception as error:  # noqa: BLE001 - whatever it raises, it is not to be done
        return None, f"{type(error).__name__}: {error}"
    if not differ_by_rounding(alone, kept):
        return None, "restored caches give other logits"
    return layout, ""


def _measure_reading(model: Any) -> float:
    """Transient bytes of a prefill for each token of a chunk, caches included."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    caches = kv.new_caches(model)
    kv.prefill_row(model, caches, [1] * _MEASURED_TOKENS)
    mx.eval(kv.arrays(caches))
    return max(0, mx.get_peak_memory() - before) / _MEASURED_TOKENS


def _agrees(model: Any, read: Callable[[], kv.KVBatch], alone: list[np.ndarray]) -> bool:
    """Whether a step of the batched rows, after `read`, gives the logits of each row alone."""
    try:
        together = _last_logits(model, [row[-1:] for row in _ROWS], read())
    except Exception:  # noqa: BLE001 - whatever it raises, it is not to be done
        return False
    return all(map(differ_by_rounding, alone, together))


def _read_alone(model: Any, tokens: list[int]) -> Caches:
    caches = kv.new_caches(model)
    mx.eval(kv.prefill_row(model, caches, tokens))
    return caches


def _read_padded(model: Any) -> kv.KVBatch:
    batch = kv.KVBatch.merge([kv.new_caches(model) for _ in _ROWS], [0] * len(_ROWS))
    model(batch.begin_prefill([row[:-1] for row in _ROWS]), cache=batch.caches)
    batch.end_prefill()
    return batch


def _read_and_go_back(model: Any) -> kv.KVBatch:
    """Batched caches of all rows without their last tokens, after a rollback of further tokens."""
    batch = kv.KVBatch.merge([_read_alone(model, row[:-1]) for row in _ROWS], _LENGTHS)
    _step(model, [[7, 6, 5], [*_ROWS[1][-1:], 9, 8], [4, 4, 4]], batch)
    batch.roll_back([3, 2, 3])
    # The longest row rolls back alone: then the others have gaps.
    _step(model, [[8], [8], [8]], batch)
    batch.roll_back([1, 2, 1])
    return batch


def _last_logits(model: Any, rows: list[list[int]], batch: kv.KVBatch) -> np.ndarray:
    logits = _step(model, rows, batch)[:, -1, :].astype(mx.float32)
    mx.eval(logits, kv.arrays(batch.caches))
    return np.array(logits)


def _step(model: Any, rows: list[list[int]], batch: kv.KVBatch) -> mx.array:
    inputs = mx.array(rows, dtype=mx.uint32)
    logits: mx.array = model(inputs, cache=batch.begin_step(inputs))
    # A layer that is written in place may be written again only once what reads it was started.
    batch.launch(logits)
    return logits
