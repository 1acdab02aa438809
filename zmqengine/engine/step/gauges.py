"""Statistics of an engine: rows, tokens, and memory by purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.interface import EngineMemory, EngineStats, ModelInfo, StepResult
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.step.length_buckets import LengthBuckets
from zmqengine.engine.step.prefill import Prefill

if TYPE_CHECKING:
    from zmqengine.engine.speculation.speculator import Speculator


class Gauges:
    """Counts what steps have made, and weighs what the engine holds. Nothing here waits for the device.

    The rows that read and those that decode are given each time: a reset makes others.
    """

    def __init__(
        self, info: ModelInfo, rows_max: int, store: PrefixCache, speculator: Speculator | None
    ) -> None:
        self._info = info
        self._rows_max = rows_max
        self._store = store
        self._speculator = speculator
        self._draft_model = None if speculator is None else speculator.model
        self.forget()

    def forget(self) -> None:
        """Count from nothing again."""
        self.steps = self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0

    def count(self, result: StepResult) -> None:
        """A step was made."""
        self.steps += 1
        self._generated_tokens += len(result.tokens)

    def leave(self, prefill: Prefill) -> None:
        """These rows are dropped; what they have read was read."""
        self._prompt_tokens += prefill.prompt_tokens
        self._cached_tokens += prefill.cached_tokens

    def stats(self, rows: int, prefill: Prefill) -> EngineStats:
        """With so many rows in all."""
        return EngineStats(
            rows_decoding=rows - len(prefill.rows),
            rows_prefilling=len(prefill.rows),
            steps=self.steps,
            prompt_tokens=self._prompt_tokens + prefill.prompt_tokens,
            cached_tokens=self._cached_tokens + prefill.cached_tokens,
            generated_tokens=self._generated_tokens,
            prompt_cache_entries=self._store.pool.index.leaves,
            prompt_cache=self._store.numbers(),
        )

    def memory(self, decode: LengthBuckets, prefill: Prefill, reading_bytes: int) -> EngineMemory:
        """Memory in use by purpose; `reading_bytes` are transient, for one chunk of prefill."""
        reading = [kv.byte_count(row.caches) for row in prefill.rows if row.caches is not None]
        drafts = self._draft_model
        # A batch that grows or takes a row in is copied, and its caches may all be copied before one is freed.
        copied = decode.largest_bytes + max(reading, default=0) + decode.empty_bytes
        return EngineMemory(
            weights=self._info.parameter_bytes + (0 if drafts is None else drafts.parameter_bytes),
            kv=decode.byte_count + sum(reading) + (0 if drafts is None else drafts.held_bytes),
            padding=decode.padding_bytes + (0 if drafts is None else drafts.padding_bytes),
            parked=self._store.parked.bytes,
            prompt_cache=self._store.held_bytes,
            buffers=mx.get_cache_memory(),
            workspace=max(reading_bytes, self._windows_bytes()) + copied,
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
        )

    def _windows_bytes(self) -> int:
        if self._speculator is None:
            return 0
        return self._speculator.workspace_bytes(self._rows_max, self._info.vocab_size)
