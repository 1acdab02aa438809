"""The engine on MLX: decode and prefill of rows, on the thread that built it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.grammar.matcher import ConstraintBroken
from zmqengine.engine.host.device import CPU, Device
from zmqengine.engine.host.device_memory import WiredMemory, limit_mlx, padding_allowance
from zmqengine.engine.interface import (
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowFailure,
    RowRequest,
    StepResult,
    TextsRequest,
)
from zmqengine.engine.load.probe import probe
from zmqengine.engine.load.warm_up import warm_up
from zmqengine.engine.models.mlx_lm import mlx_lm_version
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.block import salt_of
from zmqengine.engine.prefix_cache.disk.tier import DiskTier, open_tier
from zmqengine.engine.prefix_cache.parked_rows import ParkedRow
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row, constraint_failure
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw
from zmqengine.engine.sampling.sampler import Sampler
from zmqengine.engine.step.decode import DecodeBatch, Planner
from zmqengine.engine.step.length_buckets import LengthBuckets
from zmqengine.engine.step.pacing import StepPace
from zmqengine.engine.step.prefill import Prefill
from zmqengine.engine.step.step_clock import StepClock
from zmqengine.engine.step.text_pace import TextPace
from zmqengine.engine.step.texts import Texts
from zmqengine.engine.step.width_costs import measure_costs
from zmqengine.engine.texts.pooling import Pooling
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.seeing import Seeing

if TYPE_CHECKING:
    from zmqengine.engine.speculation.speculator import Speculator

log = logging.getLogger("zmqengine.engine")

PREFILL_CHUNK_IDLE = 2048
"""Maximum tokens of a prefill chunk while no row decodes."""
UNBOUNDED = 1 << 60
"""A size in bytes without a limit."""
# Steps between releases of unused buffers, where the device does not keep them.
_CLEAR_STEPS = 512


class MlxEngine:
    """An `Engine` on a model that mlx-lm has loaded.

    A step prefills at most `options.prefill_chunk` tokens, padding included, or while no row decodes
    `prefill_chunk_idle`; `StepPace` bounds it in time. Rows of very different lengths decode in batches of their own,
    so that padding takes at most `padding_bytes_max` in all. Everything runs on the default stream of the default
    device. Without `prompt_cache_bytes` the prefix cache is bounded by `limit_prompt_cache`.
    A model whose rows cannot be stepped together runs one at a time: then `rows_max` is 1. One whose caches cannot be
    rolled back makes one token a step, without the `speculator`. `draw`, `kernels` and `device` are the back-end's: its
    draw, its operations on KV caches, and its traits. With an `eye` rows may have images of
    up to `info.image_patches_max` patches, whose features take at most `images_bytes_max`.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        options: EngineOptions = EngineOptions(),
        *,
        prefill_chunk_idle: int = PREFILL_CHUNK_IDLE,
        padding_bytes_max: int | None = None,
        speculator: Speculator | None = None,
        draw: Draw = PLAIN_DRAW,
        kernels: kv.KVKernels = kv.PLAIN,
        device: Device = CPU,
        eye: Eye | None = None,
        images_bytes_max: int = 0,
        tower_bytes: int = 0,
    ) -> None:
        self._model = model
        self._device = device
        self._kernels = kernels
        self._pace = StepPace(options.prefill_chunk, prefill_chunk_idle, options.prefill_s, gpu=device.is_gpu)
        self._clock = StepClock(computes=not device.is_gpu)
        self.wired = WiredMemory(options.wired_limit)
        self._masks = MaskFiller(info.vocab_size, sorted(info.eos_token_ids))
        self._draw = draw
        try:
            self._abilities = probe(model)
        except BaseException:
            self.wired.restore()
            raise
        self.info = replace(info, batchable=self._abilities.mergeable)
        self.rows_max = options.rows_max if self._abilities.mergeable else 1
        self._speculator = speculator if self._abilities.widens else None
        self._draft_model = None if self._speculator is None else self._speculator.model
        self.step_tokens_max = 1 if self._speculator is None else self._speculator.widths[-1]
        self._batch_padding_bytes = (
            padding_allowance(info.parameter_bytes) if padding_bytes_max is None else padding_bytes_max
        )
        drafts_padding_bytes = 0 if self._draft_model is None else self._draft_model.padding_bytes_max
        self.padding_bytes_max = self._batch_padding_bytes + drafts_padding_bytes
        prompt_cache_bytes = UNBOUNDED if options.prompt_cache_bytes is None else options.prompt_cache_bytes
        self.images_bytes_max = images_bytes_max + tower_bytes
        self._seeing: Seeing | None = None
        if eye is not None:
            self._seeing = Seeing(eye, images_bytes_max, info.image_patches_max)
        self._images = (-1, 0) if eye is None else (eye.card.token, eye.positions_merge)
        self._saw = False
        self._pooling: Pooling | None = None
        self._texts: Texts | None = None
        self._text_pace = TextPace()
        self._store = PrefixCache(model, self._abilities.layout, prompt_cache_bytes, {"model": info.name})
        if self._abilities.uncacheable_reason:
            log.warning(
                "the prefix cache is off for this model", extra={"reason": self._abilities.uncacheable_reason}
            )
        self.disk: DiskTier | None = None
        self._steps = self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        if self._speculator is not None:
            self._prepare_speculation(self._speculator)
        self._start_batch()

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows; their prefill starts in the next `next()`. Returns the failures."""
        failures = []
        for request in requests:
            try:
                if request.row in self._rows:
                    raise ValueError("this row is already in the engine")
                self._check_room()
                row = Row(request, self.info.vocab_size, self.info.context_tokens, *self._images)
            except ConstraintBroken as error:
                failures.append(constraint_failure(request.row, error))
            except Exception as error:  # noqa: BLE001 - one bad row must not lose the others
                failures.append(RowFailure(request.row, f"{type(error).__name__}: {error}"))
            else:
                self._rows[row.id] = row
                self._prefill.add([row])
        return failures

    def read_texts(self, pooling: Pooling, width: int) -> None:
        """Take texts from now on: their last hidden states by `pooling` are vectors of `width` floats."""
        self._pooling = pooling
        self.info = replace(self.info, dimensions=width)
        self._texts = Texts(self.info, pooling, self._store)

    def embed(self, requests: Sequence[TextsRequest]) -> list[RowFailure]:
        """Add rows of texts. Returns the failures."""
        failures = []
        for request in requests:
            try:
                if self._texts is None:
                    raise ValueError("the model makes no embeddings")
                self._check_room()
                self._texts.add(request)
            except ValueError as error:
                failures.append(RowFailure(request.row, str(error)))
        return failures

    def _check_room(self) -> None:
        taken = len(self._rows) + (0 if self._texts is None else len(self._texts.rows))
        if taken >= self.rows_max:
            raise ValueError(f"all {self.rows_max} rows are taken")

    def next(self) -> StepResult:
        """Make one decode step and at most one bounded chunk of prefill. Raises what the model raises."""
        self._clock.start()
        result = StepResult()
        decode, prefill = self._decode, self._prefill
        tokens_max = self._pace.choose(decoding=decode.rows, waiting=len(prefill.rows))
        if prefill.forced and (failed := prefill.report(result)):
            decode.drop(failed)
        before = prefill.launched_tokens
        if self._seeing is not None:
            self._see(result, self._seeing)
        texts = self._texts
        texts_s = 0.0
        slices: Sequence[tuple[Row, int]] = ()
        landing: Sequence[tuple[list[Row], mx.array]] = ()
        if texts is not None and texts.rows and not result.images_s:
            if self._reads_by_layers(texts):
                texts_s = self._read_layers(texts, tokens_max, result)
            else:
                texts.start()
                slices, tokens_max = self._take_texts(texts, tokens_max)
            landing = texts.landing()
        reads = (prefill.rows or slices) and not result.images_s
        chunk = prefill.begin(tokens_max, decode.padding_room_bytes, result, slices) if reads else []
        logits = decode.step(result, self._model, chunk)
        if chunk:
            prefill.score(logits)
            for rows, hidden in prefill.read:
                assert texts is not None, "they were taken from it"
                kv.start(texts.pool(rows, hidden))
        if reads:
            decode.join(prefill.complete(result))
        self._store.settle()
        self._forget_ended(result)
        if texts is not None and landing:
            texts.report(landing, result)
        if texts is not None and not texts.rows:
            prefill.texts_caches = []
        self._steps += 1
        self._generated_tokens += len(result.tokens) - result.forced
        if self._steps % _CLEAR_STEPS == 0 and not self._device.keeps_buffers:
            mx.clear_cache()
        seconds = self._clock.seconds() - result.images_s - texts_s
        self._pace.record(prefill.launched_tokens - before, seconds, decoded=decode.is_stepping)
        if slices:
            self._text_pace.record(prefill.launched_tokens - before, seconds)
        return result

    def _reads_by_layers(self, texts: Texts) -> bool:
        """Whether texts are computed beside this step, and not in it."""
        is_beside = bool(self._decode.rows and self._pace.target_s) and not self._device.is_gpu
        return is_beside and (texts.has_layers or not self._prefill.rows)

    def _read_layers(self, texts: Texts, tokens_max: int, result: StepResult) -> float:
        """Compute layers of a chunk of texts in a share of a step's time, or build a chunk; returns the seconds."""
        tokens = self._text_pace.choose(tokens_max, self._pace.plain_s)
        if not tokens:
            return 0.0
        # So that the step in flight is not timed with them. On a CPU nothing is gained by going ahead of it.
        mx.synchronize()
        before_s = self._clock.seconds()
        if texts.has_layers:
            computed = texts.compute(tokens)
            seconds = self._clock.seconds() - before_s
            self._text_pace.record(computed, self._text_pace.plain_s + seconds)
            return seconds
        prefill = self._prefill
        slices = texts.take(tokens)
        if slices:
            prefill.begin_lazily(slices, self._decode.padding_room_bytes, result)
            pooled = [array for rows, hidden in prefill.read for array in texts.pool(rows, hidden)]
            texts.defer(prefill.complete_lazily(result), pooled, sum(count for _, count in slices))
        return self._clock.seconds() - before_s

    def _take_texts(self, texts: Texts, tokens_max: int) -> tuple[Sequence[tuple[Row, int]], int]:
        """Texts of this step, and the tokens of the chunk that are left for prompts."""
        if self._prefill.rows:
            own = tokens_max // 4
            self._text_pace.plain_s = 0.0
        elif self._decode.rows and self._pace.target_s:
            own = self._text_pace.choose(tokens_max, self._pace.plain_s, self._pace.tokens_per_s)
        else:
            own = tokens_max
            self._text_pace.plain_s = 0.0
        return (texts.take(own) if own else ()), tokens_max - own

    def _see(self, result: StepResult, seeing: Seeing) -> None:
        """Compute pieces of an image that rows wait for, in turn with chunks of prompts."""
        wanted = self._prefill.wanted_image()
        if wanted is None:
            seeing.rest()
            return
        self._saw = not (self._saw and self._prefill.has_readable)
        if not self._saw:
            return
        # A piece waits for the in-flight step anyway, as both are on one stream; so it is not timed with it. This costs
        # no more than the time in which the host builds the piece.
        mx.synchronize()
        before_s = self._clock.seconds()
        goal_s = self._pace.goal_s(self._decode.rows, len(self._prefill.rows))
        seeing.work(*wanted, goal_s, self._clock.seconds)
        result.images_s = max(1e-9, self._clock.seconds() - before_s)

    def _forget_ended(self, result: StepResult) -> None:
        """Drop the rows that a step ended."""
        before = len(self._rows)
        for token in result.tokens:
            if token.finish is not None:
                del self._rows[token.row]
        for failure in result.failures:
            del self._rows[failure.row]
        if len(self._rows) < before and self._speculator is not None:
            self._speculator.release()

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase. Unknown and repeated ids are no error."""
        ids = set(rows)
        for id_ in ids:
            self._store.forget(id_)
        leaving = [row for row in (self._rows.pop(id_, None) for id_ in ids) if row is not None]
        for row in leaving:
            row.leave()
        self._prefill.leave(leaving)
        self._decode.leave(leaving)
        if self._texts is not None:
            self._texts.remove(ids)
        if self._speculator is not None:
            self._speculator.release()
        self._store.settle()

    def park(self, row: int) -> int:
        """Take a row out, to come back by `insert`; returns the number of its tokens that stay cached.

        Waits for the step in flight: its token is kept with the row, since some caches cannot be cut by a token.
        """
        if self._texts is not None:
            self._texts.remove([row])
        parked = self._rows.pop(row, None)
        if parked is None:
            return 0
        parked.gone = True
        if self._speculator is not None:
            self._speculator.release()
        parked.keep_matcher()
        # Its forced tokens that were not reported are prefilled again, for their logits.
        if not self._abilities.mergeable or not parked.computed_tokens or parked.unreported:
            self._prefill.leave([parked])
            self._decode.leave([parked])
            return 0
        taken = (self._prefill if parked in self._prefill.rows else self._decode).take_out(parked)
        if taken is None:
            return 0
        kept = self._store.park(ParkedRow.of(parked, *taken))
        self._store.settle()
        return kept

    def reset(self, *, keep_buffers: bool = False) -> None:
        """Drop every row and all state of the batch. The prompt cache is emptied, as it may hold what failed."""
        for row in self._rows.values():
            row.keep_matcher()
        self._store.clear()
        self._prompt_tokens += self._prefill.prompt_tokens
        self._cached_tokens += self._prefill.cached_tokens
        if self._seeing is not None:
            self._seeing.clear()
        self._start_batch()
        if not keep_buffers:
            mx.clear_cache()

    def shrink_chunk(self) -> int:
        """Halve the most prompt tokens of a step; returns the new bound."""
        return self._pace.shrink()

    def warm_up(self, seconds_max: float, report: Callable[[float], None]) -> None:
        """Compile kernels of usual traffic for about `seconds_max` at most, and measure the speed of prefill.

        The engine is as new afterwards.
        """
        measured = warm_up(self, self._pace.tokens_max, seconds_max, report)
        # Buffers stay: on CUDA the first request would have to map them again.
        self.reset(keep_buffers=self._device.keeps_buffers)
        self._steps = self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._pace.begin(measured)

    def project_bytes(self, tokens: int) -> int:
        """The most bytes of KV cache for a row of `tokens`, padding apart."""
        own = self._abilities.shape.project(tokens)
        return own if self._draft_model is None else own + self._draft_model.project_bytes(tokens)

    def keep_on_disk(
        self, identity: str, options: EngineOptions, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Open the prefix cache on disk in `options.cache_path`, shared by all engines of the model with this
        `identity`.

        `wake` is called by another thread when more can be written. Raises `ConfigError` for an unusable path.
        """
        layout = self._abilities.layout
        if layout is not None and options.cache_path is not None:
            salt = salt_of(model=identity, layout=layout.describe(), mlx_lm=mlx_lm_version)
            self.disk = open_tier(self._store, salt, options, wake)

    def limit_prompt_cache(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on; returns bytes freed.

        The memory is released, except on a device that keeps buffers: there MLX reuses it below its limit.
        """
        freed = self._store.limit(bytes_max)
        if freed and not self._device.keeps_buffers:
            mx.clear_cache()
        return freed

    def limit_memory(self, bytes_max: int) -> None:
        """Tell MLX, its buffer cache and the wired limit."""
        limit_mlx(bytes_max, self.info.parameter_bytes)
        self.wired.follow(bytes_max)

    @property
    def empty_bytes(self) -> int:
        """Bytes allocated for rows to come."""
        return self._decode.empty_bytes

    def share_device(self, rows_decoding: int) -> None:
        """Shorten prefill chunks for rows of other processes."""
        self._pace.decoding_elsewhere = rows_decoding

    def keep_warm(self) -> bool:
        """Run a tiny product on a device that lowers its clock when idle."""
        if not self._device.rests:
            return False
        mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
        return True

    def stats(self) -> EngineStats:
        """Rows and counters."""
        prefill = self._prefill
        return EngineStats(
            rows_decoding=len(self._rows) - len(prefill.rows),
            rows_prefilling=len(prefill.rows) + (0 if self._texts is None else len(self._texts.rows)),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens + prefill.prompt_tokens,
            cached_tokens=self._cached_tokens + prefill.cached_tokens,
            generated_tokens=self._generated_tokens,
            prompt_cache_entries=self._store.pool.index.leaves,
            prompt_cache=self._store.numbers(),
            images={} if self._seeing is None else self._seeing.counts,
        )

    def memory(self) -> EngineMemory:
        """Memory in use by purpose."""
        decode, drafts, seeing = self._decode, self._draft_model, self._seeing
        rows = self._prefill.rows + ([] if self._texts is None else self._texts.partial_rows)
        prefilling = [kv.byte_count(row.caches) for row in rows if row.caches is not None]
        texts_bytes = kv.byte_count(self._prefill.texts_caches)
        chunk_bytes = self._abilities.chunk_bytes(self._pace.largest_tokens)
        if self._speculator is not None:
            block_bytes = self._speculator.workspace_bytes(self.rows_max, self.info.vocab_size)
            chunk_bytes = max(chunk_bytes, block_bytes)
        # A batch that grows or that a row joins is copied, and all copies may exist before the first original is freed.
        copied = decode.largest_bytes + max(prefilling, default=0) + decode.empty_bytes
        return EngineMemory(
            weights=self.info.parameter_bytes + (0 if drafts is None else drafts.parameter_bytes),
            kv=decode.byte_count
            + sum(prefilling)
            + texts_bytes
            + (0 if drafts is None else drafts.byte_count),
            padding=decode.padding_bytes + (0 if drafts is None else drafts.padding_bytes),
            parked=self._store.parked.bytes,
            prompt_cache=self._store.byte_count,
            buffers=mx.get_cache_memory(),
            workspace=chunk_bytes + copied + (0 if seeing is None else seeing.peak_bytes),
            active=mx.get_active_memory(),
            peak=mx.get_peak_memory(),
            images=0 if seeing is None else seeing.bytes,
            heap=0 if self._device.is_gpu else mx.get_active_memory() + mx.get_cache_memory(),
        )

    def close(self) -> None:
        """Free the batch and restore the wired limit. Idempotent."""
        self.reset()
        self.wired.restore()

    def _start_batch(self) -> None:
        if self._speculator is not None:
            self._speculator.clear()
        self._rows: dict[int, Row] = {}
        if self._pooling is not None:
            self._texts = Texts(self.info, self._pooling, self._store)
        project = self._abilities.shape.project
        new_batch = partial(self._new_batch, self._speculator)
        self._decode = LengthBuckets(new_batch, project, self._batch_padding_bytes, self.step_tokens_max)
        self._prefill = Prefill(
            self._model,
            self._store,
            self._abilities,
            self._kernels,
            self._seeing,
            # As many logits as a step of all rows has.
            logits_max=self.rows_max,
        )

    def _new_batch(self, planner: Planner | None) -> DecodeBatch:
        sampler = Sampler(self.info.vocab_size, self._draw)
        return DecodeBatch(self._store, sampler, self._masks, planner, self._device)

    def _prepare_speculation(self, speculator: Speculator) -> None:
        """Measure the cost of verify blocks, unless it is known, compile them, and warm the draft model up."""
        costs = speculator.costs
        if self._device.is_gpu or costs.again or not costs.seconds:
            measure_costs(
                self._model,
                self._new_batch,
                costs,
                vocab_size=self.info.vocab_size,
                rows_max=self.rows_max,
                widths=speculator.widths,
                positions_max=speculator.positions_max,
                kernels=self._kernels,
                device=self._device,
            )
        if speculator.model is not None:
            speculator.model.prepare(self.rows_max)
