"""The engine on MLX: rows of one batch, stepped on the thread that built it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.choosing import Choosing
from zmqengine.engine.constraints.mask import MaskFiller
from zmqengine.engine.decode import DecodeBatch
from zmqengine.engine.engine_options import EngineOptions
from zmqengine.engine.interface import (
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowFailure,
    RowRequest,
    StepResult,
)
from zmqengine.engine.lanes import Lanes
from zmqengine.engine.memory import padding_allowance, unwire_memory, wire_memory
from zmqengine.engine.mlx_lm_border import mlx_lm_version
from zmqengine.engine.pacing import PrefillPace
from zmqengine.engine.prefill import Prefill
from zmqengine.engine.probe import probe
from zmqengine.engine.prompt_store.disk.directory import Bounds, Directory
from zmqengine.engine.prompt_store.disk.tier import DiskTier
from zmqengine.engine.prompt_store.keys import salt_of
from zmqengine.engine.prompt_store.parked_rows import ParkedRow
from zmqengine.engine.prompt_store.store import PromptStore, numbers
from zmqengine.engine.row import Caches, Row
from zmqengine.engine.warm_up import warm_up

if TYPE_CHECKING:
    from zmqengine.engine.drafts.speculation import Speculation

log = logging.getLogger("zmqengine.engine")

PREFILL_CHUNK_IDLE = 2048
UNBOUNDED = 1 << 60
_CLEAR_STEPS = 512
# While nobody decodes, a long step holds up only those who arrive or abort.
_IDLE_SHARE = 2.5


class MlxEngine:
    """An `Engine` on a model that mlx-lm has loaded.

    While rows decode, a step reads at most `options.prefill_chunk` tokens of prompts, padding included; while none
    does, at most `prefill_chunk_idle`; with `prefill_ms`, chunks shrink until reading adds no more than that to a step
    (two and a half times as much while no row decodes). Rows of very different lengths decode in batches of their own,
    so that padding takes at most `padding_bytes_max` in all. Everything runs on the default stream of the default
    device. What `wired_limit` changes is restored by `close`. Without `prompt_cache_bytes` prompts are kept within what
    `limit_prompt_cache` says.

    A model whose rows cannot be stepped together runs one at a time: then `rows_max` is 1. One whose caches cannot go
    back by some tokens makes one token a step, whatever `speculation` proposes.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        options: EngineOptions = EngineOptions(),
        *,
        prefill_chunk_idle: int = PREFILL_CHUNK_IDLE,
        padding_bytes_max: int | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._lanes_padding_bytes = (
            padding_allowance(info.parameter_bytes) if padding_bytes_max is None else padding_bytes_max
        )
        self._model = model
        self._pace = PrefillPace(options.prefill_chunk, options.prefill_s)
        idle_chunk = max(options.prefill_chunk, prefill_chunk_idle)
        self._pace_idle = PrefillPace(idle_chunk, options.prefill_s * _IDLE_SHARE)
        self._launches: deque[tuple[int, PrefillPace]] = deque(maxlen=3)
        self._wired_limit = wire_memory(options.wired_bytes)
        self._closed = False
        self._masks = MaskFiller(info.vocab_size, sorted(info.eos_token_ids))
        try:
            self._abilities = probe(model)
        except BaseException:
            self.close()
            raise
        self.info = replace(info, batchable=self._abilities.mergeable)
        self.rows_max = options.rows_max if self._abilities.mergeable else 1
        self._speculation = speculation if self._abilities.widens else None
        self._draft_model = None if self._speculation is None else self._speculation.model
        prompt_cache_bytes = UNBOUNDED if options.prompt_cache_bytes is None else options.prompt_cache_bytes
        self._store = PromptStore(model, self._abilities.layout, prompt_cache_bytes, {"model": info.name})
        if self._abilities.not_kept:
            log.warning("prompts of this model cannot be kept", extra={"reason": self._abilities.not_kept})
        self.disk: DiskTier | None = None
        self._steps = self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        if self._speculation is not None:
            self._speculation.prepare(model, self.rows_max)
        self._start_batch()

    @property
    def step_tokens_max(self) -> int:
        """The most tokens that one `next()` makes for a row."""
        return 1 if self._speculation is None else self._speculation.width_max

    @property
    def padding_bytes_max(self) -> int:
        """The most bytes that padding takes, in all batches of rows."""
        drafts = 0 if self._draft_model is None else self._draft_model.padding_bytes_max
        return self._lanes_padding_bytes + drafts

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows; their prefill starts in the next `next()`. Returns those that could not be added."""
        failures = []
        for request in requests:
            try:
                if request.row in self._rows:
                    raise ValueError("this row is already in the engine")
                if len(self._rows) >= self.rows_max:
                    raise ValueError(f"all {self.rows_max} rows are taken")
                row = Row(request, self.info.vocab_size, self.info.context_tokens)
            except Exception as error:  # noqa: BLE001 - one bad row must not lose the others
                failures.append(RowFailure(request.row, f"{type(error).__name__}: {error}"))
            else:
                self._rows[row.id] = row
                self._prefill.add([row])
        return failures

    def next(self) -> StepResult:
        """Make one decode step, then at most one bounded chunk of prefill. Raises what the model raises."""
        started_s = time.perf_counter()
        read_before = self._prefill.prompt_tokens
        result = StepResult()
        self._decode.next(result)
        pace = self._pace if self._decode.busy else self._pace_idle
        self._decode.join(self._prefill.next(pace.tokens, self._decode.padding_room_bytes, result))
        self._store.settle()
        if self._speculation is not None and (result.prefills or len(self._decode) > 1):
            self._speculation.clock.disturb()
        for token in result.tokens:
            if token.finish is not None:
                del self._rows[token.row]
        for failure in result.failures:
            del self._rows[failure.row]
        if self._draft_model is not None:
            self._draft_model.release()
        self._generated_tokens += len(result.tokens)
        self._steps += 1
        if self._steps % _CLEAR_STEPS == 0:
            mx.clear_cache()
        self._keep_pace(pace, self._prefill.prompt_tokens - read_before, time.perf_counter() - started_s)
        return result

    def _workspace_bytes(self, prefilling: list[Caches]) -> int:
        # A batch that grows or takes a row in is copied, and its caches may all be copied before one is freed.
        chunk = max(self._pace.tokens, self._pace_idle.tokens)
        grown = max(map(kv.byte_count, prefilling), default=0)
        windows = (
            0
            if self._speculation is None
            else self._speculation.workspace_bytes(self.rows_max, self.info.vocab_size)
        )
        return max(self._abilities.chunk_bytes(chunk), windows) + max(self._decode.largest_bytes, grown)

    def _keep_pace(self, pace: PrefillPace, tokens_read: int, seconds: float) -> None:
        # A chunk is waited for up to two steps after the one that launched it, or at once: it depends on the device.
        self._launches.append((tokens_read, pace))
        tokens, launcher = max(self._launches, key=lambda launch: launch[0])
        launcher.record(tokens, seconds)

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase. Unknown and repeated ids are no error."""
        ids = set(rows)
        for id_ in ids:
            self._store.forget(id_)
        leaving = [row for row in (self._rows.pop(id_, None) for id_ in ids) if row is not None]
        for row in leaving:
            row.gone = True
        self._prefill.leave(leaving)
        self._decode.leave(leaving)
        if self._draft_model is not None:
            self._draft_model.release()
        self._store.settle()

    def park(self, row: int) -> int:
        """Take a row out, to come back by `insert`; returns how many of its tokens need not be read again.

        The step on its way is waited for: its token goes with the row, as some caches cannot be cut by a token.
        """
        parked = self._rows.pop(row, None)
        if parked is None:
            return 0
        parked.gone = True
        if self._draft_model is not None:
            self._draft_model.release()
        if not self._abilities.mergeable or not parked.held:
            self._prefill.leave([parked])
            self._decode.leave([parked])
            return 0
        taken = (
            self._prefill.take_out(parked) if parked in self._prefill.rows else self._decode.take_out(parked)
        )
        if taken is None:
            return 0
        kept = self._store.park(ParkedRow.of(parked, *taken))
        self._store.settle()
        return kept

    def reset(self) -> None:
        """Drop every row and all state of the batch. The prompt cache is emptied, as it may hold what failed."""
        self._store.clear()
        self._prompt_tokens += self._prefill.prompt_tokens
        self._cached_tokens += self._prefill.cached_tokens
        self._start_batch()
        mx.clear_cache()

    def warm_up(self, seconds_max: float, report: Callable[[float], None]) -> None:
        """Do once what traffic will need, for at most about `seconds_max`; afterwards the engine is as good as new.

        Prompts are then read at a pace that suits what was seen.
        """
        measured = warm_up(self, chunk=self._pace.tokens_max, seconds_max=seconds_max, report=report)
        self.reset()
        self._steps = self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._launches.clear()
        for pace in (self._pace, self._pace_idle):
            if measured is not None:
                pace.begin(measured.prompt_tokens_a_second, measured.step_s)
            else:
                pace.forget()

    def project_bytes(self, tokens: int) -> int:
        """The most bytes of KV cache that are allocated for one row while it holds `tokens`, padding apart."""
        own = self._abilities.shape.project(tokens)
        return own if self._draft_model is None else own + self._draft_model.project_bytes(tokens)

    def keep_on_disk(
        self, identity: str, options: EngineOptions, ring: Callable[[], None] = lambda: None
    ) -> None:
        """Keep prompts in `options.cache_path` too, for all engines of the model that `identity` tells from others.

        `ring` is called by a thread when there is room to write more. Raises `ConfigError` for an unusable path.
        """
        layout, path = self._abilities.layout, options.cache_path
        if layout is not None and path is not None:
            salt = salt_of(model=identity, layout=layout.describe(), mlx_lm=mlx_lm_version)
            bounds = Bounds(
                options.cache_dir_bytes, options.cache_dir_free_bytes, options.cache_dir_writes_bytes
            )
            self.disk = DiskTier(self._store, Directory(path, salt, bounds), ring)

    def limit_prompt_cache(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on; returns bytes freed."""
        freed = self._store.limit(bytes_max)
        if freed:
            # Whoever evicts wants the memory itself, not buffers kept for reuse.
            mx.clear_cache()
        return freed

    def release_buffers(self) -> None:
        """Give back the buffers of arrays that are gone."""
        mx.clear_cache()

    def stats(self) -> EngineStats:
        """Rows and counters."""
        return EngineStats(
            rows_decoding=len(self._rows) - len(self._prefill.rows),
            rows_prefilling=len(self._prefill.rows),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens + self._prefill.prompt_tokens,
            cached_tokens=self._cached_tokens + self._prefill.cached_tokens,
            generated_tokens=self._generated_tokens,
            prompt_cache_entries=self._store.kept.index.leaves,
            prompt_cache=numbers(self._store),
        )

    def memory(self) -> EngineMemory:
        """What memory is used for now."""
        prefilling = [row.caches for row in self._prefill.rows if row.caches is not None]
        drafts = self._draft_model
        return EngineMemory(
            weights=self.info.parameter_bytes + (0 if drafts is None else drafts.parameter_bytes),
            kv=kv.byte_count(self._decode.caches)
            + sum(map(kv.byte_count, prefilling))
            + (0 if drafts is None else drafts.held_bytes),
            padding=self._decode.padding_bytes + (0 if drafts is None else drafts.padding_bytes),
            parked=self._store.parked.bytes,
            prompt_cache=self._store.held_bytes,
            buffers=mx.get_cache_memory(),
            workspace=self._workspace_bytes(prefilling),
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
        )

    def close(self) -> None:
        """Free the batch and restore the wired limit. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_decode"):
            self._store.clear()
            self._start_batch()
        unwire_memory(self._wired_limit)
        mx.clear_cache()

    def _start_batch(self) -> None:
        if self._draft_model is not None:
            self._draft_model.clear()
        self._rows: dict[int, Row] = {}
        shape = self._abilities.shape
        self._decode = Lanes(
            self._new_lane,
            shape.project,
            self._lanes_padding_bytes,
            self.step_tokens_max,
        )
        self._prefill = Prefill(self._model, self._store, self._abilities)

    def _new_lane(self) -> DecodeBatch:
        choosing = Choosing(self.info.vocab_size, self._masks)
        return DecodeBatch(self._model, self._store, choosing, self._speculation)
