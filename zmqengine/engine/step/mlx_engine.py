"""The engine on MLX: rows of one model, stepped together, on the thread that built it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from zmqengine.engine.adapter_files import AdapterFiles
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.grammar.matcher import ConstraintBroken
from zmqengine.engine.host.device import CPU, Device
from zmqengine.engine.host.device_memory import WiredMemory, limit_mlx
from zmqengine.engine.interface import (
    EngineMemory,
    EngineStats,
    ModelInfo,
    RowDivergence,
    RowFailure,
    RowPrefill,
    RowRequest,
    RowToken,
    StepResult,
    TextsRequest,
)
from zmqengine.engine.kv.packed_blocks import blocks_at_rest
from zmqengine.engine.load.probe import bytes_per_token
from zmqengine.engine.load.warm_up import warm_up
from zmqengine.engine.models.mlx_lm import mlx_lm_version
from zmqengine.engine.models.model_runner import ModelRunner, RowPiece
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.block import salt_of
from zmqengine.engine.prefix_cache.branches import branches
from zmqengine.engine.prefix_cache.disk.tier import DiskTier, open_tier
from zmqengine.engine.prefix_cache.offers import Offer, arrays_of
from zmqengine.engine.prefix_cache.parked_rows import ParkedRow
from zmqengine.engine.prefix_cache.store import Hit, PrefixCache
from zmqengine.engine.row import Row, SampledToken, constraint_failure
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw
from zmqengine.engine.sampling.sampler import Sampler, measure
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.step.chunk import share_out
from zmqengine.engine.step.pacing import StepPace
from zmqengine.engine.step.prefill_order import pick
from zmqengine.engine.step.step import Forced, Step
from zmqengine.engine.step.step_clock import StepClock
from zmqengine.engine.step.texts import Texts
from zmqengine.engine.step.width_costs import measure_costs
from zmqengine.engine.texts.pooling import Pooling
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.seeing import Seeing
from zmqengine.errors import ModelLoadError
from zmqengine.sampling_params import TOKEN_ID_MAX

if TYPE_CHECKING:
    from zmqengine.engine.adapters.loaded import LoadedAdapters
    from zmqengine.engine.speculation.speculator import Speculator

log = logging.getLogger("zmqengine.engine")

PREFILL_CHUNK_IDLE = 2048
"""Maximum tokens of a prefill chunk while no row decodes."""
NO_ADAPTERS = "this model runs by mlx-lm's own code, where all rows share one"
UNBOUNDED = 1 << 60
"""A size in bytes without a limit."""
# Steps between releases of unused buffers, where the device does not keep them.
_CLEAR_STEPS = 512
# A prompt that diverges from a cached one after this many tokens is reported, with this many tokens from there.
_DIVERGED_TOKENS_MIN = 1024
_TOLD_TOKENS = 16


class MlxEngine:
    """An `Engine` on the model of a `runner`.

    A row's tokens catch up: each step computes some that are known and not computed yet, one of a row in decode, a
    slice of a prompt, a verify block. A step computes at most `options.prefill_chunk` tokens of prompts, or while no
    row decodes `prefill_chunk_idle`; `StepPace` bounds it in time. Everything runs on the default stream of the default
    device. Without `prompt_cache_bytes` the prefix cache is bounded by `limit_prompt_cache`.
    A model whose rows cannot be stepped together runs one at a time: then `rows_max` is 1. One whose caches cannot be
    rolled back makes one token a step, without the `speculator`. `draw` and `device` are the back-end's: its draw, and
    its traits. With an `eye` rows may have images of up to `info.image_patches_max` patches, whose features take at
    most `images_bytes_max`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        info: ModelInfo,
        options: EngineOptions = EngineOptions(),
        *,
        prefill_chunk_idle: int = PREFILL_CHUNK_IDLE,
        speculator: Speculator | None = None,
        draw: Draw = PLAIN_DRAW,
        device: Device = CPU,
        eye: Eye | None = None,
        images_bytes_max: int = 0,
        tower_bytes: int = 0,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._device = device
        self._pace = StepPace(options.prefill_chunk, prefill_chunk_idle, options.prefill_s, gpu=device.is_gpu)
        self._clock = StepClock(computes=not device.is_gpu)
        self.wired = WiredMemory(options.wired_limit)
        self._masks = MaskFiller(info.vocab_size, sorted(info.eos_token_ids))
        self._draw = draw
        try:
            self._chunk_token_bytes = bytes_per_token(runner)
        except BaseException:
            self.wired.restore()
            raise
        self.info = replace(info, batchable=runner.batches)
        self.rows_max = options.rows_max if runner.batches else 1
        self._speculator = speculator if runner.rolls_back else None
        self._draft_model = None if self._speculator is None else self._speculator.model
        self._chooser = self._draft_model if isinstance(self._draft_model, DraftModel) else None
        self.info = replace(self.info, prefill_keep=self._chooser is not None)
        self.step_tokens_max = 1 if self._speculator is None else self._speculator.widths[-1]
        self.padding_bytes_max = runner.padding_bytes_max
        prompt_cache_bytes = UNBOUNDED if options.prompt_cache_bytes is None else options.prompt_cache_bytes
        self.images_bytes_max = images_bytes_max + tower_bytes
        self._seeing: Seeing | None = None
        if eye is not None:
            self._seeing = Seeing(eye, images_bytes_max, info.image_patches_max)
        self._images = (-1, 0) if eye is None else (eye.card.token, eye.positions_merge)
        # Whether the last step with such work had pieces of an image, or the draft model read.
        self._saw = self._chose = False
        self._pooling: Pooling | None = None
        self._texts: Texts | None = None
        self._blocks, restore = blocks_at_rest(runner.blocks, runner.restore, options.kv_bits)
        self._store = PrefixCache(self._blocks, restore, prompt_cache_bytes, {"model": info.name})
        if runner.uncacheable_reason:
            log.warning("the prefix cache is off for this model", extra={"reason": runner.uncacheable_reason})
        self.disk: DiskTier | None = None
        self._rows: dict[int, Row] = {}
        self._sampler = Sampler(info.vocab_size, draw)
        self._sampled_rows: list[Row] = []
        # The rows in decode, as the speculator saw them last.
        self._polled_rows: list[Row] = []
        self._in_flight: Step | None = None
        # Offers whose copies out of caches were started since the last launch.
        self._copies: list[Offer] = []
        # Rows that ended in the step that landed last.
        self._ended: list[Row] = []
        # Whether the last step was a verify block.
        self._drafted = False
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
                if request.prefill_keep is not None and self._chooser is None:
                    raise ValueError("prefill_keep needs a draft model")
                row = Row(request, self.info.vocab_size, self.info.context_tokens, *self._images)
            except ConstraintBroken as error:
                failures.append(constraint_failure(request.row, error))
            except Exception as error:  # noqa: BLE001 - one bad row must not lose the others
                failures.append(RowFailure(request.row, f"{type(error).__name__}: {error}"))
            else:
                self._rows[row.id] = row
        return failures

    def load_adapter(self, files: AdapterFiles, make_room: Callable[[int], None]) -> None:
        """See `Engine`."""
        if self._adapters is None:
            raise ModelLoadError(f"the adapter {files.name}: {NO_ADAPTERS}")
        before = self._adapters.bytes
        self._adapters.load(files, make_room)
        self._note_adapters(before)

    def unload_adapter(self, name: str) -> None:
        """See `Engine`."""
        assert self._adapters is not None, "an adapter of this name is loaded"
        before = self._adapters.bytes
        self._adapters.unload(name)
        self._note_adapters(before)

    def _note_adapters(self, bytes_before: int) -> None:
        adapters = self._adapters
        assert adapters is not None, "they have changed"
        weights_bytes = self.info.parameter_bytes + adapters.bytes - bytes_before
        self.info = replace(self.info, parameter_bytes=weights_bytes, adapters=adapters.digests)
        if not self._device.keeps_buffers:
            mx.clear_cache()

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

    # --- a step ---

    def next(self) -> StepResult:
        """Compute one step, and report the tokens of the one before, or on a CPU its own. Raises what the model
        raises."""
        self._clock.start()
        result = StepResult()
        if self._seeing is not None:
            self._see(result, self._seeing)
        if self._chooser is not None and not result.aside_s:
            self._choose_tokens(result, self._chooser)
        may_draft = self._may_draft()
        if may_draft:
            # Draft tokens follow the last token of a row.
            self._land(result)
        step = self._plan(result, may_draft=may_draft)
        if step is not None:
            step.outputs = self._runner.forward(
                step.pieces, step.tokens(self._in_flight), step.width, self._seeing
            )
            self._built(step, result)
        if not self._runner.launches_ahead:
            self._land(result)
        self._launch(step)
        self._land(result)
        if step is not None and step.rows and step.sampled is None:
            self._sample(step)
        self._in_flight = step
        self._drafted = step is not None and step.block is not None
        if not self._device.is_gpu:
            self._land(result)
        self._settle(step, result)
        return result

    def _may_draft(self) -> bool:
        """Whether the next step may be a verify block."""
        decoding = self._decoding()
        if self._speculator is None or not decoding:
            # Rejected tokens of a block are known once it has landed.
            return self._drafted
        changed, self._polled_rows = decoding != self._polled_rows, decoding
        return self._drafted or self._speculator.is_worth_waiting(
            decoding, changed=changed, in_flight=int(self._in_flight is not None)
        )

    def _plan(self, result: StepResult, *, may_draft: bool) -> Step | None:
        """The next step: a token or a verify block of every row in decode, and slices of prompts and texts."""
        decoding = self._decoding()
        block = None
        if decoding and may_draft and self._speculator is not None:
            block = self._speculator.plan(decoding)
        pieces = []
        for index, row in enumerate(decoding):
            count = 1 if block is None else 1 + len(block.draft_tokens[index])
            pieces.append(RowPiece(row, row.computed_tokens, count, samples=count))
        rows = list(decoding)
        if not result.aside_s:
            for piece in self._plan_prompts(len(decoding), result):
                pieces.append(piece)
                if piece.samples:
                    rows.append(piece.row)
        return Step(pieces, rows, len(decoding), block) if pieces else None

    def _decoding(self) -> list[Row]:
        """The rows in decode whose last token is not in flight."""
        rows = self._rows.values()
        return [row for row in rows if row.launched and row.sampled < row.max_tokens and not row.gone]

    def _prompts(self) -> list[Row]:
        """The rows in prefill, the oldest first."""
        return [row for row in self._rows.values() if row.remaining and not row.gone]

    def _plan_prompts(self, decoding: int, result: StepResult) -> list[RowPiece]:
        """Slices of prompts and texts within the step's budget."""
        self._restore_parked(result)
        prompts = self._prompts()
        waiting = pick([row for row in prompts if row.keep is None], self._store)
        if self._seeing is not None:
            waiting = [row for row in waiting if self._seeing.readable(row)]
        tokens_max = self._pace.choose(decoding=decoding, waiting=len(prompts))
        texts: list[tuple[Row, int]] = []
        if self._texts is not None and self._texts.rows:
            own = tokens_max // 4 if waiting or decoding else tokens_max
            texts = self._texts.take(max(1, own))
            tokens_max -= sum(count for _, count in texts)
        readable = [row.remaining if self._seeing is None else self._seeing.readable(row) for row in waiting]
        pieces = []
        for row, count in zip(waiting, share_out(readable, max(1, tokens_max)), strict=True):
            if count:
                pieces.append(self._slice(row, count, result))
        return pieces + [self._slice(row, count, result) for row, count in texts]

    def _slice(self, row: Row, count: int, result: StepResult) -> RowPiece:
        """The next tokens of a prompt or text, at most `count`, from its longest cached prefix on."""
        if row.cache is None and row.reuses_prefix:
            self._fetch_prefix(row, result)
        if row.cache is None:
            row.cache = self._runner.open(len(row.tokens))
        start = row.computed_tokens
        end = min(start + count, row.prefill_tokens)
        stops = [stop for stop in row.branches if stop > start]
        if self._seeing is not None:
            end = min(end, start + self._seeing.readable(row))
        if self._runner.ends_apart and row.place is None and start < row.prefill_tokens - 1:
            stops.append(row.prefill_tokens - 1)
        first = row.first_forced - 1
        scores = row.has_forced and row.logprobs is not None
        if scores:
            # As many logits at once as a step of all rows has.
            stops.append(first if start < first else start + self.rows_max)
        end = min(end, *stops) if stops else end
        end = start + self._runner.cut(end - start)
        scored = (first - start, end - start) if scores and start >= first else (0, 0)
        if scores and end == row.prefill_tokens:
            # The last token predicts what is sampled.
            scored = (scored[0], scored[1] - 1)
        scored = (max(0, scored[0]), scored[1])
        samples = int(end == row.prefill_tokens and row.place is None and row.sampled < row.max_tokens)
        return RowPiece(row, start, end - start, samples, scored, pooled=row.place is not None)

    def _built(self, step: Step, result: StepResult) -> None:
        """Note that the forward pass of a step is built: its tokens count as computed."""
        assert step.outputs is not None
        scored, hidden = iter(step.outputs.scored), iter(step.outputs.hidden)
        for number, piece in enumerate(step.pieces):
            row, end = piece.row, piece.start + piece.count
            if number < step.decoding:
                row.computed_tokens += step.block is None
                continue
            if piece.pooled:
                assert self._texts is not None, "the row is one of its texts"
                if (text := self._texts.pool(row, next(hidden))) is not None:
                    step.texts.append(text)
            elif row.has_forced:
                self._note_forced(step, piece, scored)
            self._note_computed(row, end)
            if piece.samples:
                step.offers += [(row, offer) for offer in row.offers]
                row.offers = []
                row.launched = True
            # The last token counts as the input of the first decode step.
            self._prompt_tokens += piece.count - (end == row.prefill_tokens and row.place is None)
            if row.place is None:
                done = end if row.remaining else row.prefill_tokens
                result.prefills.append(RowPrefill(row.id, done, row.prefill_tokens, row.cached, row.kept))

    def _note_computed(self, row: Row, end: int) -> None:
        """Count the tokens up to `end` as computed, and offer them to the prefix cache at the end and at a branch."""
        is_branch = end in row.branches
        is_whole = end == row.prefill_tokens and row.place is None
        # The token whose logits come first is computed again by every row that begins with these tokens.
        row.computed_tokens = end - is_whole
        # States can only be kept before it is.
        is_end = (is_whole and not self._store.keeps_states) or (
            end == row.prefill_tokens - 1 and row.place is None
        )
        if (is_branch or is_end) and self._store.wants(row) and (offer := self._store.offer(row)) is not None:
            row.offers.append(offer)
        if is_branch:
            row.branches.remove(end)
        row.computed_tokens = end

    def _note_forced(self, step: Step, piece: RowPiece, scored: Any) -> None:
        """Note the forced tokens that a piece has passed; they are reported when the step lands."""
        row = piece.row
        first = max(piece.start + 1, row.first_forced)
        last = min(piece.start + piece.count, row.prefill_tokens - 1)
        tokens = row.tokens[first : last + 1]
        if not tokens:
            return
        logprobs = None
        if row.logprobs is not None:
            logprobs = measure(next(scored), mx.array(tokens, dtype=mx.uint32), row.logprobs)
        step.forced.append(Forced(row, tokens, logprobs))

    def _launch(self, step: Step | None) -> None:
        """Start a step, and sample unless masks must wait."""
        if not self._runner.launches_ahead and self._copies:
            # Before slots are written: see `engine/kv`.
            mx.eval(arrays_of(self._copies))
            self._store.note_computed(self._copies)
            self._copies = []
        if step is None:
            return
        # The device computes them before the step.
        step.copies, self._copies = self._copies, []
        outputs = step.outputs
        assert outputs is not None
        if step.rows and not step.is_masked:
            self._sample(step)
            return
        logits = [] if outputs.logits is None else [outputs.logits]
        self._start(step, logits)

    def _sample(self, step: Step) -> None:
        """Sample the tokens of a step, and start it."""
        assert step.outputs is not None
        assert step.outputs.logits is not None
        if step.rows != self._sampled_rows:
            self._sampler.set_rows(step.rows)
            self._sampled_rows = list(step.rows)
        mask = None
        if step.is_masked:
            matchers = [row.matcher for row in step.rows]
            drafts: list[Sequence[int]] = [()] * len(step.rows)
            if step.block is not None:
                drafts[: step.decoding] = step.block.draft_tokens
            bits = self._masks.fill_windows(matchers, drafts, step.width)
            mask = lambda logits: self._masks.apply(logits, bits)  # noqa: E731
        step.sampled = self._sampler.sample(step.outputs.logits, step.drafted(), mask)
        for index, row in enumerate(step.rows):
            row.sampled += step.block is None or index >= step.decoding
        self._start(step, step.sampled.arrays())

    def _start(self, step: Step, arrays: list[mx.array]) -> None:
        assert step.outputs is not None
        forced = [
            one
            for each in step.forced
            if each.logprobs is not None
            for one in each.logprobs
            if one is not None
        ]
        vectors = [vector for _, vector in step.texts]
        partial = [] if self._texts is None else self._texts.unread()
        mx.async_eval(arrays, step.outputs.marker, list(step.outputs.started), forced, vectors, partial)  # type: ignore[no-untyped-call]

    def _land(self, result: StepResult) -> None:
        """Wait for the step in flight, and report its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        landed = step.land(result)
        self._store.note_computed(step.copies)
        for row, offer in step.offers:
            if row in landed.doubtful:
                self._store.withdraw(offer)
            else:
                self._store.accept(offer)
        if step.texts:
            assert self._texts is not None, "texts were taken from it"
            self._texts.report(step.texts, result)
        if step.block is not None and self._speculator is not None:
            self._speculator.commit(step.rows[: step.decoding], step.block, landed.accepted)
        for row in landed.failed:
            self._free(row)
        self._ended += landed.ended

    def _settle(self, step: Step | None, result: StepResult) -> None:
        """Offer what rows that ended leave, forget them, and learn the pace of the step.

        Copies follow the launch: they would start the step that was built.
        """
        ended, self._ended = self._ended, []
        for row in ended:
            self._leave(row, self._in_flight)
        self._copies += self._store.settle()
        for token in result.tokens:
            if token.finish is not None:
                del self._rows[token.row]
        for failure in result.failures:
            self._rows.pop(failure.row, None)
        has_ended = any(token.finish is not None for token in result.tokens)
        if (has_ended or result.failures) and self._speculator is not None:
            self._speculator.release()
        self._steps += 1
        self._generated_tokens += len(result.tokens) - result.forced
        if self._steps % _CLEAR_STEPS == 0 and not self._device.keeps_buffers:
            mx.clear_cache()
        seconds = self._clock.seconds() - result.aside_s
        prompt_tokens = 0 if step is None else step.prompt_tokens
        self._pace.record(prompt_tokens, seconds, decoded=step is not None and step.decoding > 0)

    # --- rows leave ---

    def _leave(self, row: Row, later: Step | None = None) -> None:
        """Offer the tokens of a row to the prefix cache and free its cache.

        An offer is pending while a step that computed some of them has not landed; whether what that leaves in the slot
        is finite is not known either. The caller must `settle` the store before a slot is written.
        """
        if row.cache is None:
            return
        ahead = later is not None and any(piece.row is row for piece in later.pieces)
        if not row.launched:
            if self._store.wants(row) and (offer := self._store.offer(row)) is not None:
                row.offers.append(offer)
            self._store.prove(row)
        elif row.computed_tokens <= len(row.tokens) and row.is_finite and self._store.wants(row):
            offer = self._store.offer(row)
            if offer is not None and later is not None and row in later.rows:
                later.offers.append((row, offer))
            else:
                self._store.accept(offer)
        row.is_finite = row.is_finite and not ahead
        self._free(row)

    @staticmethod
    def _free(row: Row) -> None:
        if row.cache is not None:
            row.cache.close(is_finite=row.is_finite)
            row.cache = None

    # --- images, prefixes, parked rows ---

    def _see(self, result: StepResult, seeing: Seeing) -> None:
        """Compute pieces of an image that rows wait for, in turn with chunks of prompts."""
        prompts = self._prompts()
        wanted = None
        if any(row.features for row in prompts):
            prompts = pick(prompts, self._store)
            wanted = seeing.wanted(prompts)
        if wanted is None:
            seeing.rest()
            return
        self._saw = not (self._saw and any(map(seeing.readable, prompts)))
        if not self._saw:
            return
        with self._aside(result, len(prompts)) as goal_s:
            seeing.work(*wanted, goal_s, self._clock.seconds)

    def _choose_tokens(self, result: StepResult, chooser: DraftModel) -> None:
        """Have the draft model read slices of a prompt that is read in part, in turn with chunks of other prompts."""
        prompts = self._prompts()
        waiting = [row for row in prompts if row.keep is not None]
        self._chose = bool(waiting) and not (self._chose and len(waiting) < len(prompts))
        if not self._chose:
            return
        with self._aside(result, len(prompts)) as goal_s:
            kept = chooser.choose(waiting[0], goal_s, self._clock.seconds)
            if kept is not None:
                waiting[0].read_only(kept)

    @contextlib.contextmanager
    def _aside(self, result: StepResult, prompts: int) -> Iterator[float]:
        """Time work between two steps; yields the seconds that it may take while `prompts` prompts wait."""
        # The work waits for the in-flight step anyway, as both are on one stream; so it is not timed with it. This
        # costs no more than the time in which the host builds its graph.
        mx.synchronize()
        before_s = self._clock.seconds()
        yield self._pace.goal_s(len(self._decoding()), prompts)
        result.aside_s = max(1e-9, self._clock.seconds() - before_s)

    def _fetch_prefix(self, row: Row, result: StepResult) -> None:
        """Start a row from its longest cached prefix."""
        hit = self._store.fetch(row)
        row.computed_tokens = row.cached = hit.tokens
        row.cache = hit.cache
        self._cached_tokens += hit.tokens
        if row.place is not None:
            return
        if self._store.keeps_states:
            known = branches(row.computed_tokens, row.prefill_tokens - 1, hit.known)
            row.branches = sorted({*known, *(stop for stop in row.branches if stop > row.computed_tokens)})
        if (divergence := _divergence(row, hit)) is not None:
            self._store.counts["divergences"] += 1
            result.divergences.append(divergence)

    def _restore_parked(self, result: StepResult) -> None:
        """Give parked rows their caches back, and report the tokens that were in flight when they were parked."""
        if not len(self._store.parked):
            return
        for row in self._prompts():
            # One whose forced tokens are still wanted was never parked.
            is_new = row.cache is None and row.is_cacheable and not row.has_forced
            parked = self._store.parked.take(row) if is_new else None
            if parked is None:
                continue
            row.computed_tokens, row.cache, row.cached = (
                parked.computed_tokens,
                parked.cache,
                parked.reusable,
            )
            self._cached_tokens += row.cached
            if parked.sampled is not None:
                row.launched = row.is_finite = True
                done = row.prefill_tokens
                result.prefills.append(RowPrefill(row.id, done, done, row.cached))
                self._report_parked(row, parked.sampled, result)

    def _report_parked(self, row: Row, sampled: SampledToken, result: StepResult) -> None:
        """Report the token that was in flight when a row was parked."""
        row.sampled += 1
        try:
            finish = row.take(sampled.token)
        except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
            row.leave()
            result.failures.append(constraint_failure(row.id, error))
            self._free(row)
            return
        result.tokens.append(RowToken(row.id, sampled.token, sampled.logprobs, finish))
        if finish is not None:
            row.leave()
            self._leave(row)
            self._copies += self._store.settle()

    # --- rows are removed, parked, dropped ---

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase. Unknown and repeated ids are no error."""
        ids = set(rows)
        for id_ in ids:
            self._store.forget(id_)
        leaving = [row for row in (self._rows.pop(id_, None) for id_ in ids) if row is not None]
        for row in leaving:
            row.leave()
            self._leave(row, self._in_flight)
        if self._texts is not None:
            self._texts.remove(ids)
        if self._speculator is not None:
            self._speculator.release()
        self._copies += self._store.settle()

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
        # Its forced tokens that were not reported are prefilled again, for their logits; of a prompt that is read in
        # part the tokens are chosen again.
        if (
            not self._runner.batches
            or not parked.computed_tokens
            or parked.unreported
            or parked.cache is None
            or not parked.is_cacheable
        ):
            self._leave(parked, self._in_flight)
            self._copies += self._store.settle()
            return 0
        sampled = None
        step = self._in_flight
        if step is not None and parked in step.rows and step.block is None:
            sampled = step.read_row(parked)
            if sampled is None:
                # These caches must not be used again.
                parked.is_finite = False
                self._free(parked)
                return 0
        # The offers that this row's logit would have proven.
        pending = [] if step is None else [pair for pair in step.offers if pair[0] is parked]
        for pair in pending:
            assert step is not None
            step.offers.remove(pair)
            self._store.accept(pair[1]) if sampled is not None else self._store.withdraw(pair[1])
        if not parked.launched:
            self._store.prove(parked)
        return self._store.park(ParkedRow.of(parked, sampled))

    def reset(self, *, keep_prompts: bool = False, keep_buffers: bool = False) -> None:
        """Drop every row and all state of the batch. The prompt cache is emptied, as it may hold what failed; with
        `keep_prompts` blocks stay that were computed before."""
        for row in self._rows.values():
            row.keep_matcher()
        if keep_prompts:
            self._store.drop_doubtful()
        else:
            self._store.clear()
        self._runner.clear()
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
        own = self._runner.project_bytes(tokens)
        return own if self._draft_model is None else own + self._draft_model.project_bytes(tokens)

    def keep_on_disk(
        self, identity: str, options: EngineOptions, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Open the prefix cache on disk in `options.cache_path`, shared by all engines of the model with this
        `identity`.

        `wake` is called by another thread when more can be written. Raises `ConfigError` for an unusable path.
        """
        layout = self._blocks
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

    def trim(self, empty_bytes_max: int) -> int:
        """See `Engine`. Buffers stay on a device that keeps them: there MLX reuses them below its limit."""
        ahead_bytes = empty_bytes_max - self._store.byte_count - self._store.parked.bytes
        waiting = [len(row.tokens) for row in self._rows.values() if row.cache is None and not row.gone]
        left = self._runner.trim(empty_bytes_max, ahead_bytes, waiting)
        if self._draft_model is not None:
            left += self._draft_model.trim(empty_bytes_max - left, ahead_bytes - left)
        return left

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
        prompts = len(self._prompts())
        return EngineStats(
            rows_decoding=len(self._rows) - prompts,
            rows_prefilling=prompts + (0 if self._texts is None else len(self._texts.rows)),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            prompt_cache_entries=self._store.pool.index.leaves,
            prompt_cache=self._store.numbers(),
            images={} if self._seeing is None else self._seeing.counts,
        )

    def memory(self) -> EngineMemory:
        """Memory in use by purpose."""
        runner, drafts, seeing = self._runner, self._draft_model, self._seeing
        chunk_bytes = int(self._chunk_token_bytes * self._pace.largest_tokens)
        if self._speculator is not None:
            block_bytes = self._speculator.workspace_bytes(self.rows_max, self.info.vocab_size)
            chunk_bytes = max(chunk_bytes, block_bytes)
        return EngineMemory(
            weights=self.info.parameter_bytes + (0 if drafts is None else drafts.parameter_bytes),
            kv=max(0, runner.byte_count - self._store.parked.bytes)
            + (0 if drafts is None else drafts.byte_count),
            padding=runner.padding_bytes,
            parked=self._store.parked.bytes,
            prompt_cache=self._store.byte_count,
            buffers=mx.get_cache_memory(),
            workspace=chunk_bytes + runner.copied_bytes + (0 if seeing is None else seeing.peak_bytes),
            active=mx.get_active_memory() + runner.host_bytes,
            peak=mx.get_peak_memory() + runner.host_bytes,
            images=0 if seeing is None else seeing.bytes,
        )

    def close(self) -> None:
        """Free the batch and restore the wired limit. Idempotent."""
        self.reset()
        self.wired.restore()

    def _start_batch(self) -> None:
        if self._speculator is not None:
            self._speculator.clear()
        self._rows = {}
        self._texts = None if self._pooling is None else Texts(self.info, self._pooling, self._store)
        self._sampler = Sampler(self.info.vocab_size, self._draw)
        self._sampled_rows = []
        self._polled_rows = []
        self._in_flight = None
        self._copies = []
        self._ended = []
        self._drafted = False

    def _prepare_speculation(self, speculator: Speculator) -> None:
        """Measure the cost of verify blocks, unless it is known, compile them, and warm the draft model up."""
        costs = speculator.costs
        if self._device.is_gpu or costs.again or not speculator.has_all_costs:
            measure_costs(
                self._runner,
                self._draw,
                costs,
                vocab_size=self.info.vocab_size,
                rows_max=self.rows_max,
                widths=speculator.widths,
                positions_max=speculator.positions_max,
                is_gpu=self._device.is_gpu,
            )
            self._runner.clear()
        if speculator.model is not None:
            speculator.model.prepare(self.rows_max)


def _divergence(row: Row, hit: Hit) -> RowDivergence | None:
    total = row.prefill_tokens
    if hit.differs is None or hit.known < max(_DIVERGED_TOKENS_MIN, total // 2):
        return None
    came = row.tokens[hit.known : hit.known + _TOLD_TOKENS]
    # The difference may be an image, which has a name here and no token id.
    kept = [token for token in hit.differs[:_TOLD_TOKENS].tolist() if token <= TOKEN_ID_MAX]
    return RowDivergence(row.id, hit.known, total, kept, came)
