"""One batch of rows that decode: one model call a step makes one token for each of them.

The call of a step is started before the tokens of the step before are looked at, so the device computes while
the caller hands those tokens on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.interface import RowFailure, RowToken, StepResult, TokenLogprobs
from zmqengine.engine.penalties import Penalties
from zmqengine.engine.prompt_store.offers import Offer
from zmqengine.engine.prompt_store.store import PromptStore
from zmqengine.engine.row import Caches, MadeToken, Row
from zmqengine.engine.sampling import DrawPlan, LogprobArrays, choose, measure, plan_draw

if TYPE_CHECKING:
    from zmqengine.engine.constraints.mask import MaskFiller


@dataclass
class _Flight:
    """A step on its way: the tokens that it makes for `rows`, in order.

    `offers` are caches that it goes on from, with the row whose logit tells whether they are good.
    """

    rows: list[Row]
    tokens: mx.array
    chosen_logits: mx.array
    measured: list[Row]
    logprobs: LogprobArrays | None
    offers: list[tuple[Row, Offer]]


class DecodeBatch:
    """Rows in decode and their merged caches. What rows leave behind is offered to `store`.

    With `masks` every row has a grammar. Then the tokens of a step are looked at before the next one starts: they
    say which tokens may follow. Their masks are filled while the forward pass runs.
    """

    def __init__(
        self, model: Any, vocab_size: int, store: PromptStore, masks: MaskFiller | None = None
    ) -> None:
        self.rows: list[Row] = []
        self.caches: Caches = []
        self.steps = 0
        self._model = model
        self._vocab_size = vocab_size
        self._store = store
        self._flight: _Flight | None = None
        self._landing: _Flight | None = None
        self._changed = True
        self._plan: DrawPlan | None = None
        self._penalties = Penalties(vocab_size)
        self._masks = masks
        self._landed = StepResult()
        self._measured: list[Row] = []
        self._measured_index: mx.array | None = None

    @property
    def constrained(self) -> bool:
        """Whether it is for rows with a grammar."""
        return self._masks is not None

    def join(self, rows: Sequence[Row], caches: Caches) -> None:
        """Add rows whose caches hold all of the prompt but its last token."""
        self.caches = kv.extend(self.caches, caches)
        self.rows.extend(rows)
        self._changed = True

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; those that are not here are ignored. What they held is offered to others."""
        leaving = {id(row) for row in rows}
        for place, row in enumerate(self.rows):
            if id(row) in leaving:
                self._offer(row, place, self._flight)
        self._drop(leaving)

    def take_out(self, row: Row) -> tuple[Caches, MadeToken | None] | None:
        """Drop a row that is here and give its caches, with the token on its way, which is waited for.

        None if that token was made of something that is not a number: nobody may go on from these caches.
        """
        caches = kv.extract(self.caches, self.rows.index(row), row.held)
        self._drop({id(row)})
        if not row.launched:
            self._store.prove(row)
            return caches, None
        assert self._flight is not None, "every row that was launched has a step on its way"
        place = self._flight.rows.index(row)
        if not math.isfinite(cast(float, self._flight.chosen_logits[place].item())):
            return None
        token = cast(int, self._flight.tokens[place].item())
        return caches, MadeToken(token, _by_row(self._flight).get(row.id))

    def _offer(self, row: Row, place: int, flight: _Flight | None) -> None:
        """`row` leaves: offer its caches, which `flight` goes on from; without one they are known to be good."""
        if not row.launched:
            self._store.prove(row)
            return
        if row.held <= len(row.tokens) and self._store.wants(row):
            offer = self._store.offer(row, self.caches, kv.Place(place, row.held))
            if flight is None:
                self._store.accept(offer)
            elif offer is not None:
                flight.offers.append((row, offer))

    def _drop(self, leaving: set[int]) -> None:
        places = [place for place, row in enumerate(self.rows) if id(row) not in leaving]
        if len(places) == len(self.rows):
            return
        self.caches = kv.keep_rows(self.caches, places, [row.held for row in self.rows])
        self.rows = [self.rows[place] for place in places]
        self._changed = True

    @property
    def idle(self) -> bool:
        """Whether there is neither a row nor a step on its way."""
        return not self.rows and self._flight is None

    def launch(self) -> None:
        """Start the next step."""
        self._landing, self._flight = self._flight, None if self.constrained else self._flight
        if self.constrained:
            self.land(self._landed)
        # A row whose last token is on its way needs no further step.
        self.leave([row for row in self.rows if row.sampled >= row.max_tokens])
        self._flight = self._start(self._landing) if self.rows else None

    def land(self, result: StepResult) -> None:
        """Report the tokens of the step before the one that `launch` has started, waiting for them."""
        if result is not self._landed:
            result.add(self._landed)
            self._landed = StepResult()
        if self._landing is not None:
            self._report(self._landing, result)
            self._landing = None

    def _start(self, landed: _Flight | None) -> _Flight:
        inputs = self._inputs(landed)
        if self._changed:
            self._follow_change()
        logits = self._model(inputs[:, None], cache=self.caches)[:, -1, :]
        if self._penalties.index is not None:
            logits = self._penalties.apply(logits)
        allowed = logits if self._masks is None else self._masked(logits, self._masks)
        tokens = choose(allowed, self._plan)
        if self._penalties.index is not None:
            self._penalties.count(tokens)
        chosen_logits = mx.take_along_axis(allowed, tokens[:, None], axis=-1)[:, 0]
        logprobs = None
        if self._measured:
            some = self._measured_index
            logprobs = measure(
                logits if some is None else logits[some],
                tokens if some is None else tokens[some],
                max(row.logprobs or 0 for row in self._measured),
            )
        offers = [(row, offer) for row in self.rows for offer in row.offers]
        for row in self.rows:
            row.offers = []
            row.held += 1
            row.sampled += 1
            row.launched = True
        self.steps += 1
        flight = _Flight(list(self.rows), tokens, chosen_logits, self._measured, logprobs, offers)
        kv.start(tokens, chosen_logits, [array for array in logprobs or () if array is not None])
        return flight

    def _masked(self, logits: mx.array, masks: MaskFiller) -> mx.array:
        kv.start(logits)
        return masks.apply(logits, masks.fill([row.matcher for row in self.rows if row.matcher is not None]))

    def _inputs(self, landed: _Flight | None) -> mx.array:
        """The last token of each row: on its way for rows that have been through a step, else known."""
        parts = []
        if landed is not None:
            here = {id(row) for row in self.rows}
            places = [place for place, row in enumerate(landed.rows) if id(row) in here]
            if len(places) == len(landed.rows):
                parts.append(landed.tokens)
            elif places:
                parts.append(landed.tokens[mx.array(places)])
        fresh = [row.tokens[-1] for row in self.rows if not row.launched or landed is None]
        if fresh:
            parts.append(mx.array(fresh, dtype=mx.uint32))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _follow_change(self) -> None:
        self._plan = plan_draw(self.rows, self._vocab_size)
        self._penalties.set_rows(self.rows)
        places = [place for place, row in enumerate(self.rows) if row.logprobs is not None]
        self._measured = [self.rows[place] for place in places]
        self._measured_index = None if len(places) == len(self.rows) else mx.array(places)
        self._changed = False

    def _report(self, landed: _Flight, result: StepResult) -> None:
        tokens: list[int] = landed.tokens.tolist()  # type: ignore[assignment]
        chosen_logits: list[float] = landed.chosen_logits.tolist()  # type: ignore[assignment]
        logprobs = _by_row(landed)
        spoilt = _not_finite(landed.rows, chosen_logits)
        for row, offer in landed.offers:
            if id(row) in spoilt:
                self._store.withdraw(offer)
            else:
                self._store.accept(offer)
        left = []
        for row, token in zip(landed.rows, tokens, strict=True):
            if row.gone:
                continue
            message = _spoilt(row) if id(row) in spoilt else ""
            finish = None
            if not message:
                try:
                    finish = row.take(token)
                except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
                    message = f"the constraint failed: {error}"
            if message:
                row.gone = True
                spoilt.add(id(row))
                result.failures.append(RowFailure(row.id, message))
                continue
            result.tokens.append(RowToken(row.id, token, logprobs.get(row.id), finish))
            if finish is not None:
                row.gone = True
                left.append(row)
        self._drop(spoilt)
        self.leave(left)


def _spoilt(row: Row) -> str:
    if row.matcher is not None and row.matcher.error:
        return f"the constraint failed: {row.matcher.error}"
    return "the model's output for this row is not a number"


def _not_finite(rows: Sequence[Row], chosen_logits: Sequence[float]) -> set[int]:
    """The rows, by their `id()`, whose logit is not a number."""
    if math.isfinite(sum(chosen_logits)):
        return set()
    return {id(row) for row, logit in zip(rows, chosen_logits, strict=True) if not math.isfinite(logit)}


def _by_row(landed: _Flight) -> dict[int, TokenLogprobs]:
    if landed.logprobs is None:
        return {}
    chosen: Any = landed.logprobs.chosen.tolist()
    top: Any = [[] for _ in landed.measured]
    if landed.logprobs.top_tokens is not None and landed.logprobs.top_logprobs is not None:
        tokens: Any = landed.logprobs.top_tokens.tolist()
        top = [
            list(zip(*best, strict=True))
            for best in zip(tokens, cast(Any, landed.logprobs.top_logprobs.tolist()), strict=True)
        ]
    return {
        row.id: TokenLogprobs(chosen[place], top[place][: row.logprobs])
        for place, row in enumerate(landed.measured)
    }
