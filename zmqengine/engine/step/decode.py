"""Decode: one model call a step makes a token for each row of a batch, or verifies several draft tokens.

Theory of operation. One step is in flight between two calls of `complete`. The next one is launched before the tokens
of the one in flight are read, so the device computes while the host reports. Its inputs are those tokens, still on the
device. Three things bend that order:

- Grammars. A mask depends on the token before it. The forward pass of a step with masks is launched as usual; its
  tokens are sampled once the step before has landed and the masks are filled on the host.
- Draft tokens follow the last token of a row, so a step that may verify some is launched after the one in flight has
  landed. Rejected tokens are rolled back when the verify block lands, before the next launch: no step ever reads
  columns that a rollback could still take away.
- First tokens. Where launching computes (on a CPU), a first token lands before the next step is launched.

Rows may end while a step of theirs is in flight. They are marked `gone`, their results are dropped, and their caches
are offered to the prefix cache before another row may take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.host.device import CPU, Device
from zmqengine.engine.interface import StepResult
from zmqengine.engine.models.segment import Segment
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Caches, Row, SampledToken
from zmqengine.engine.sampling.sampler import Mask, Sampler
from zmqengine.engine.speculation.verify_block import VerifyBlock
from zmqengine.engine.step.inflight import InflightStep
from zmqengine.engine.vision.seeing import shift


class Planner(Protocol):
    """Plans verify blocks: a `Speculator`, or a stand-in of fixed widths."""

    def is_worth_waiting(self, rows: Sequence[Row], *, changed: bool) -> bool:
        """Whether to land the step in flight before the next one is launched, since that may be a verify block.

        `changed`: rows joined or left since the last call.
        """
        ...

    def plan(self, rows: Sequence[Row]) -> VerifyBlock | None:
        """The verify block of the next step of `rows`, whose tokens are all known; None for a plain step."""
        ...

    def commit(self, rows: Sequence[Row], block: VerifyBlock, accepted: Sequence[int]) -> None:
        """A verify block of `rows` has landed: `accepted[i]` draft tokens of row i were accepted."""
        ...


class DecodeBatch:
    """Rows in decode and their KV caches. Caches of rows that leave are offered to `store`.

    `sampler` is this batch's own; `masks` fills grammar masks. With a `planner` a step may verify draft tokens.
    """

    def __init__(
        self,
        store: PrefixCache,
        sampler: Sampler,
        masks: MaskFiller,
        planner: Planner | None = None,
        device: Device = CPU,
    ) -> None:
        self.rows: list[Row] = []
        self.kv = kv.KVBatch()
        self._store = store
        self._sampler = sampler
        self._masks = masks
        self._planner = planner
        self._in_flight: InflightStep | None = None
        # The verify block of the step that was begun.
        self._block: VerifyBlock | None = None
        self._changed = True
        # Positions ahead of the tokens, for the present rows.
        self._shift: mx.array | None = None
        # MLX lets ten operations wait, and on a CPU there are no larger ones: to start a step takes as long as the step
        # (mlx/transforms.cpp, MAX_ACTIVE_TASKS).
        self._start_computes = not device.is_gpu

    @property
    def idle(self) -> bool:
        """Whether there is neither a row nor a step in flight."""
        return not self.rows and self._in_flight is None

    # --- a step ---

    def begin(self, result: StepResult, may_speculate: Callable[[], bool]) -> Segment | None:
        """The batch's segment of the next packed step; None if it has none. `complete` must follow the model's call.

        Rows draft only while `may_speculate()`. Tokens that had to land first are reported to `result`.
        """
        previous = self._in_flight
        if previous is not None and self._must_land_first(previous, may_speculate):
            self._land(previous, result)
            previous = None
        if complete := [row for row in self.rows if row.sampled >= row.max_tokens]:
            # Their last token is in flight.
            self.leave(complete)
        if not self.rows:
            if previous is not None:
                self._land(previous, result)
            return None
        self._block = self._plan(may_speculate) if previous is None else None
        inputs = self._block.inputs if self._block is not None else self._last_tokens(previous)
        is_idle = previous is None and not self._start_computes
        if self._changed:
            self._shift = shift(self.rows)
        return Segment(inputs, self.kv.begin_step(inputs, idle=is_idle), shift=self._shift)

    def complete(self, logits: mx.array, result: StepResult, *, beside_prompts: bool = False) -> None:
        """Launch the step that `begin` began, with these `logits`, and report the tokens of the one before.

        Where the launch computes, a step with first tokens or `beside_prompts` is reported at once: its tokens would
        wait for the next one, and maybe for another chunk.
        """
        previous, self._in_flight = self._in_flight, self._launch(logits, self._block)
        if previous is not None:
            self._land(previous, result)
        if self._in_flight is not None and self._in_flight.sampled is None:
            self._sample(self._in_flight)
        step = self._in_flight
        if self._start_computes and step is not None and (step.is_first or beside_prompts):
            self._land(step, result)

    def _launch(self, logits: mx.array, block: VerifyBlock | None) -> InflightStep:
        """Start the step, and sample unless masks must wait."""
        step = InflightStep(list(self.rows), logits, block)
        for row in self.rows:
            step.is_first |= not row.launched
            row.launched = True
            step.is_masked |= row.matcher is not None
            if block is None:
                row.computed_tokens += 1
            if row.offers:
                step.offers += [(row, offer) for offer in row.offers]
                row.offers = []
        if self._changed:
            self._sampler.set_rows(self.rows)
            self._changed = False
        if step.is_masked:
            self.kv.launch(logits)
        else:
            self._sample(step)
        return step

    def _sample(self, step: InflightStep) -> None:
        """Start to sample the tokens of a step."""
        drafted = None if step.block is None else step.block.drafted
        mask = self._grammar_mask(step) if step.is_masked else None
        step.sampled = self._sampler.sample(step.logits, drafted, mask)
        if step.block is None:
            for row in step.rows:
                row.sampled += 1
        self.kv.launch(step.sampled.arrays())

    def _land(self, step: InflightStep, result: StepResult) -> None:
        """Wait for a step, report its tokens and drop the rows that ended."""
        if step is self._in_flight:
            self._in_flight = None
        landed = step.report(result)
        if self.kv.has_replaced:
            self.kv.landed()
        if step.offers:
            self._settle_offers(step.offers, landed.doubtful)
        if step.block is not None:
            self._commit(step, step.block, landed.accepted)
        if landed.failed:
            self.drop(landed.failed)
        if landed.ended:
            self.leave(landed.ended)

    # --- hooks: speculation, grammars, rows that end, the prefix cache ---

    def _must_land_first(self, previous: InflightStep, may_speculate: Callable[[], bool]) -> bool:
        """Whether the next step needs the tokens of the one in flight on the host."""
        if previous.block is not None:
            return True
        planner = self._planner
        return (
            planner is not None
            and planner.is_worth_waiting(self.rows, changed=self._changed)
            and may_speculate()
        )

    def _plan(self, may_speculate: Callable[[], bool]) -> VerifyBlock | None:
        """The verify block of the next step; None for a plain step."""
        return self._planner.plan(self.rows) if self._planner is not None and may_speculate() else None

    def _commit(self, step: InflightStep, block: VerifyBlock, accepted: Sequence[int]) -> None:
        """Roll back the rejected tokens of a verify block. A row that joined since has none."""
        assert self._in_flight is None, "a verify block is rolled back before the next step is launched"
        if self.rows:
            lengths = self.kv.lengths
            self.kv.roll_back(
                [length - row.computed_tokens for length, row in zip(lengths, self.rows, strict=True)]
            )
        if self._planner is not None:
            self._planner.commit(step.rows, block, accepted)

    def _grammar_mask(self, step: InflightStep) -> Mask:
        """The mask of a step's logits [rows * width, vocab], filled on the host."""
        matchers = [row.matcher for row in step.rows]
        drafts = [()] * len(matchers) if step.block is None else step.block.draft_tokens
        bits = self._masks.fill_windows(matchers, drafts, step.width)
        return lambda logits: self._masks.apply(logits, bits)

    def _settle_offers(self, offers: Sequence[tuple[Row, Offer]], doubtful: set[Row]) -> None:
        """Let the prefix cache have what a step has proven, and take back what came from logits that are not finite."""
        for row, offer in offers:
            if row in doubtful:
                self._store.withdraw(offer)
            else:
                self._store.accept(offer)

    # --- rows join and leave ---

    def join(self, rows: Sequence[Row], caches: kv.KVBatch) -> None:
        """Add rows whose caches hold all of the prompt but its last token."""
        self.kv.join(caches)
        self.rows.extend(rows)
        self._changed = True

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows and offer their caches to the prefix cache; rows of other batches are ignored."""
        leaving = set(rows)
        indices = [index for index, row in enumerate(self.rows) if row in leaving]
        for index, source in self.kv.leaving(indices).items():
            self._offer(self.rows[index], source)
        self.drop(leaving)

    def take_out(self, row: Row) -> tuple[Caches, SampledToken | None] | None:
        """Drop a row of this batch; returns its caches and its token in flight, for which it waits.

        None if that token came from logits that are not finite: these caches must not be used again.
        """
        caches = self.kv.extract(self.rows.index(row), row.computed_tokens)
        self.drop({row})
        if not row.launched:
            self._store.prove(row)
            return caches, None
        step = self._in_flight
        if step is None or step.block is not None:
            # A verify block in flight is left out of the caches: its tokens are computed again.
            return caches, None
        made = step.read_row(row)
        return None if made is None else (caches, made)

    def _offer(self, row: Row, source: kv.Source) -> None:
        """Offer the caches of a leaving row: pending while a step that reads them is in flight, else at once."""
        if not row.launched:
            self._store.prove(row)
            return
        if row.computed_tokens <= len(row.tokens) and self._store.wants(row):
            offer = self._store.offer(row, source)
            if self._in_flight is None:
                self._store.accept(offer)
            elif offer is not None:
                self._in_flight.offers.append((row, offer))

    def drop(self, leaving: set[Row]) -> None:
        """Drop rows without offering their caches; rows of other batches are ignored."""
        indices = [index for index, row in enumerate(self.rows) if row not in leaving]
        if len(indices) < len(self.rows):
            self.rows = [self.rows[index] for index in self.kv.keep_rows(indices)]
            self._changed = True

    def _last_tokens(self, previous: InflightStep | None) -> mx.array:
        """The last token of each row, [rows, 1] on the device: in flight for rows of the step before, else known."""
        if previous is None or previous.sampled is None:
            return mx.array([row.tokens[-1:] for row in self.rows], dtype=mx.uint32)
        tokens = previous.sampled.tokens
        if previous.rows == self.rows:
            return tokens[:, None]
        indices = {row: index for index, row in enumerate(previous.rows)}
        known = [row.tokens[-1] for row in self.rows if row not in indices]
        if known:
            tokens = mx.concatenate([tokens.astype(mx.uint32), mx.array(known, dtype=mx.uint32)])
        after = iter(range(len(previous.rows), len(previous.rows) + len(known)))
        index = [indices[row] if row in indices else next(after) for row in self.rows]
        return tokens[mx.array(np.array(index, np.uint32))][:, None]
