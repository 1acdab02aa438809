"""One batch of rows that decode: one model call a step makes a token for each row, or several.

Theory of operation. At any time at most one step is in flight. `launch` starts the next step before the tokens of the
in-flight one are read, so the device computes while the caller publishes; `land` then reads and reports the earlier
one. Three things bend that order:

- Grammars. A mask depends on the token before it. The step's logits are started at launch; its tokens are chosen in
  `land`, once the earlier tokens are known and the masks are filled on the host.
- Draft tokens. They follow the last token of a row, so a step that may draft waits: the in-flight step is reported
  first, into `_landed`, and the verify block is launched from known tokens. Rejected tokens are rolled back when the
  block lands, before the next launch: no step ever reads columns that a rollback could still take away.
- First tokens. Where launching computes (on a CPU), a first token lands before the next step is started.

Rows may end while a later step of theirs is in flight. They are marked `gone`, their results are dropped, and the
caches they leave are offered to the prefix cache before another row may take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.host.backend import start_computes
from zmqengine.engine.interface import StepResult
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Caches, MadeToken, Row
from zmqengine.engine.speculation.choosing import Choosing
from zmqengine.engine.speculation.verify_block import VerifyBlock
from zmqengine.engine.step.inflight import InflightStep


class Planner(Protocol):
    """Plans verify blocks: a `Speculator`, or a stand-in of fixed widths."""

    def is_worth_waiting(self, rows: Sequence[Row], *, changed: bool) -> bool:
        """Whether to land the in-flight step before the next one starts, since that may be a verify block."""
        ...

    def plan(self, rows: Sequence[Row]) -> VerifyBlock | None:
        """The verify block of the next step of `rows`, whose tokens are all known; None for a plain step."""
        ...

    def commit(self, rows: Sequence[Row], block: VerifyBlock, accepted: Sequence[int]) -> None:
        """A verify block of `rows` has landed: `accepted[i]` draft tokens of row i were accepted."""
        ...


class DecodeBatch:
    """Rows in decode and their merged caches. Caches of rows that leave are offered to `store`.

    `choosing` makes the sampler of this batch. With a `speculator` a step may verify draft tokens.
    """

    def __init__(
        self,
        model: Any,
        store: PrefixCache,
        choosing: Callable[[], Choosing],
        speculator: Planner | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self.kv = kv.KVBatch()
        self._model = model
        self._store = store
        self._flight: InflightStep | None = None
        self._landing: InflightStep | None = None
        self._changed = True
        self._choosing = choosing()
        self._speculator = speculator
        self._landed = StepResult()
        self._start_computes = start_computes()

    def join(self, rows: Sequence[Row], caches: kv.KVBatch) -> None:
        """Add rows whose caches hold all of the prompt but its last token."""
        self.kv.join(caches)
        self.rows.extend(rows)
        self._changed = True

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows and offer their caches to the prefix cache; rows of other batches are ignored."""
        leaving = {id(row) for row in rows}
        places = [place for place, row in enumerate(self.rows) if id(row) in leaving]
        for place, source in self.kv.leaving(places).items():
            self._offer(place, source)
        self._drop(leaving)

    def take_out(self, row: Row) -> tuple[Caches, MadeToken | None] | None:
        """Drop a row of this batch; returns its caches and its token in flight, which is waited for.

        None if that token came from logits that are not finite: these caches must not be used again.
        """
        caches = self.kv.extract(self.rows.index(row), row.held)
        self._drop({id(row)})
        if not row.launched:
            self._store.prove(row)
            return caches, None
        if row.window or self._flight is None:
            # A verify block in flight is left out of the caches: its tokens are computed again.
            return caches, None
        made = self._flight.made(row)
        return None if made is None else (caches, made)

    def _offer(self, place: int, source: kv.Source) -> None:
        """Offer the caches of a leaving row. They are pending while a step that reads them is in flight, else valid."""
        row, flight = self.rows[place], self._flight
        if not row.launched:
            self._store.prove(row)
            return
        if row.held <= len(row.tokens) and self._store.wants(row):
            offer = self._store.offer(row, source)
            if flight is None:
                self._store.accept(offer)
            elif offer is not None:
                flight.offers.append((row, offer))

    def _drop(self, leaving: set[int]) -> None:
        places = [place for place, row in enumerate(self.rows) if id(row) not in leaving]
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in self.kv.keep_rows(places)]
        self._changed = True

    @property
    def idle(self) -> bool:
        """Whether there is neither a row nor a step on its way."""
        return not self.rows and self._flight is None

    def launch(self, may_draft: Callable[[], bool]) -> None:
        """Start the next step, unless a first token has to land before; rows draft only while `may_draft()`."""
        if self._flight is not None and self._flight.is_first and self._start_computes:
            # A first token would wait for a whole step more.
            self._landing, self._flight = self._flight, None
            return
        # A row whose last token is in flight needs no further step. A verify block makes at least one token.
        self.leave([row for row in self.rows if row.sampled + (row.window > 0) >= row.max_tokens])
        speculator = self._speculator if self.rows and may_draft() else None
        flight, block = self._flight, None
        if flight is not None and (
            flight.window is not None
            or (speculator is not None and speculator.is_worth_waiting(self.rows, changed=self._changed))
        ):
            self._flight = None
            self._report(flight, self._landed)
        if self._flight is None and speculator is not None and self.rows:
            block = speculator.plan(self.rows)
        self._landing = self._flight
        if not self.rows:
            self._flight = None
        elif block is not None:
            self._flight = self._start(block.inputs, block)
        else:
            self._flight = self._start(_last_tokens(self.rows, self._landing)[:, None], None)

    def land(self, result: StepResult) -> None:
        """Wait for the step before the one that `launch` has started, and report its tokens.

        With them the grammar masks of the started step are known: its tokens are chosen now.
        """
        result.add(self._landed)
        self._landed = StepResult()
        if self._landing is not None:
            self._report(self._landing, result)
            self._landing = None
        if self._flight is not None and self._flight.logits is not None:
            self._choose(self._flight, self._flight.logits)

    def _start(self, inputs: mx.array, window: VerifyBlock | None) -> InflightStep:
        """Start one model call on the last token of each row [rows, 1], or on a verify block [rows, width]."""
        changed, self._changed = self._changed, False
        if changed:
            self._choosing.set_rows(self.rows)
        is_idle = self._landing is None and not self._start_computes
        logits = self._model(inputs, cache=self.kv.begin_step(inputs, idle=is_idle))
        is_first = not all(row.launched for row in self.rows)
        for row in self.rows:
            if window is None:
                row.held += 1
            else:
                row.window += window.width
        flight = InflightStep(
            list(self.rows), self._choosing.measured, _take_offers(self.rows), window, is_first
        )
        if self._choosing.constrained:
            kv.start(logits)
            flight.logits = logits
        else:
            self._choose(flight, logits)
        return flight

    def _choose(self, flight: InflightStep, logits: mx.array) -> None:
        """Start to choose the tokens of a step, [rows, width], from its logits."""
        if flight.window is None:
            flight.choices = self._choosing.one(logits[:, -1, :])
            for row in flight.rows:
                row.sampled += 1
        else:
            flight.choices = self._choosing.several(logits, flight.window)
        flight.logits = None
        kv.start(flight.choices.arrays())

    def _report(self, flight: InflightStep, result: StepResult) -> None:
        landed = flight.land(result)
        for row, offer in flight.offers:
            take = self._store.withdraw if id(row) in landed.doubtful else self._store.accept
            take(offer)
        if flight.window is not None:
            assert self._flight is None, "a verify block is rolled back before the next step starts"
            _roll_back(self.rows, self.kv)
        self._drop(landed.failed)
        self.leave(landed.ended)
        if self._speculator is not None and flight.window is not None:
            self._speculator.commit(flight.rows, flight.window, landed.accepted)


def _roll_back(rows: Sequence[Row], caches: kv.KVBatch) -> None:
    """Roll back the rejected tokens of a verify block. A row that joined since has none."""
    if rows:
        counts = [row.window for row in rows]
        for row in rows:
            row.window = 0
        caches.roll_back(counts)


def _last_tokens(rows: Sequence[Row], landing: InflightStep | None) -> mx.array:
    """The last token of each row, [rows] on the device: in flight for rows that were in the last step, else known."""
    coming = None if landing is None else landing.last_tokens(rows)
    parts = [] if coming is None else [coming]
    fresh = [place for place, row in enumerate(rows) if landing is None or not row.launched]
    if fresh:
        parts.append(mx.array([rows[place].tokens[-1] for place in fresh], dtype=mx.uint32))
    tokens = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if not fresh or fresh[0] + len(fresh) == len(rows):
        return tokens
    # In place, the last row was moved into a freed slot, so new rows are not at the end: restore the batch's order.
    order = sorted(range(len(rows)), key=set(fresh).__contains__)
    return tokens[resident(np.argsort(order).tolist())]


def _take_offers(rows: Sequence[Row]) -> list[tuple[Row, Offer]]:
    """Take the blocks that rows offer to the prefix cache; the step that starts now validates them."""
    offers = [(row, offer) for row in rows for offer in row.offers]
    for row in rows:
        row.offers = []
        row.launched = True
    return offers
