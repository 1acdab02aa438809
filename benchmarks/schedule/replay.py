"""A batch without an engine, driven by an order of service."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.schedule.arrivals import TracedRequest
from benchmarks.schedule.evenness import Evenness
from benchmarks.schedule.lines import Line
from benchmarks.schedule.machine import Machine
from benchmarks.schedule.options import ScheduleOptions
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import ServiceOrder
from zmqengine.worker.scheduler.rates import ServiceRates

CHARGE_STEPS = 8
"""Steps between charges of rows: a worker charges at each step, which would dominate the replay's time."""


class Outcome(NamedTuple):
    """How one request fared, in seconds of the replay; the estimate of its wait when it came, if there was one."""

    request: TracedRequest
    wait_s: float
    total_s: float
    estimate_s: float | None


class Totals(NamedTuple):
    """Totals of the whole replay."""

    lasted_s: float
    made_tokens: int
    parked: int
    displaced: int
    reread_tokens: int
    waiting_max: int
    kv_tokens_max: int
    jain: float | None


class _Row:
    __slots__ = (
        "end_step",
        "estimate_s",
        "made",
        "made_step",
        "request",
        "started_s",
        "ticket",
        "to_charge",
        "unread",
    )

    def __init__(self, ticket: Ticket, request: TracedRequest, estimate_s: float | None) -> None:
        self.ticket = ticket
        self.request = request
        self.estimate_s = estimate_s
        self.started_s = -1.0
        self.made = 0
        self.made_step = 0
        self.unread = request.prompt_tokens
        self.to_charge = request.prompt_tokens
        self.end_step = -1

    @property
    def kv_tokens(self) -> int:
        """KV cache tokens at its start, or after `settle`."""
        return self.request.prompt_tokens + self.made

    def held(self, step: int) -> int:
        """KV cache tokens after this step."""
        return self.kv_tokens + (step - self.made_step if self.end_step >= 0 else 0)

    def settle(self, step: int) -> int:
        """Advance its tokens to this step; returns the number decoded since."""
        if self.end_step < 0:
            return 0
        made = step - self.made_step
        self.made += made
        self.made_step = step
        return made


class _KeptCaches:
    """KV caches of preempted rows, as far as there is room."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._rows: dict[_Row, int] = {}

    def keep(self, row: _Row, tokens: int) -> bool:
        """Keep the cache of a row; False if it is empty or there is no room."""
        if not tokens or self._tokens + tokens > self._tokens_max:
            return False
        self._rows[row] = tokens
        self._tokens += tokens
        return True

    def take(self, row: _Row) -> None:
        """The row is back."""
        self._tokens -= self._rows.pop(row, 0)


class Replay:
    """Serves requests in the order that `line` says, as fast as `machine` can, until the last one has ended.

    As in the worker: the first in line is not overtaken, a row reserves its prompt and some growth, prompts are
    read in chunks beside the rows that make tokens, a row is parked when memory runs out and makes room where
    the line says so, and its cache is kept while there is room for it.
    """

    def __init__(self, options: ScheduleOptions, machine: Machine, line: Line) -> None:
        self._options = options
        self._machine = machine
        self._line = line
        self._rates = ServiceRates()
        self._evenness = Evenness(options.window_s)
        self._rows: dict[Ticket, _Row] = {}
        self._waiting: dict[Ticket, _Row] = {}
        self._kept = _KeptCaches(options.parked_tokens)
        self._reading: deque[_Row] = deque()
        self._ends: dict[int, list[_Row]] = {}
        self._decoding = 0
        self._kv = 0
        self._now_s = 0.0
        self._step = 0
        self._outcomes: list[Outcome] = []
        self._counts: Counter[str] = Counter()

    def run(self, requests: Sequence[TracedRequest]) -> tuple[list[Outcome], Totals]:
        """Run the replay; returns all requests in the order of their ends."""
        due, changed = 0, True
        while due < len(requests) or self._waiting or self._rows:
            if not self._waiting and not self._rows:
                self._now_s = max(self._now_s, requests[due].arrival_s)
            while due < len(requests) and requests[due].arrival_s <= self._now_s:
                self._arrive(requests[due], due)
                due += 1
                changed = True
            if changed:
                self._admit()
            changed = self._run_step()
            self._evenness.look(self._now_s)
        return self._outcomes, Totals(
            self._now_s,
            self._counts["made"],
            self._counts["parked"],
            self._counts["displaced"],
            self._counts["reread"],
            self._counts["waiting_max"],
            self._counts["kv_max"],
            self._evenness.index(),
        )

    def _arrive(self, request: TracedRequest, arrival: int) -> None:
        ticket = Ticket(
            request.session, 1.0, request.priority, request.prompt_tokens, None, arrival, self._now_s
        )
        self._enqueue(_Row(ticket, request, self._estimate_s(request)))
        self._counts["waiting_max"] = max(self._counts["waiting_max"], len(self._waiting))

    def _estimate_s(self, request: TracedRequest) -> float | None:
        if not isinstance(self._line, ServiceOrder):
            return None
        is_free = not self._waiting and len(self._rows) < self._options.rows
        places = self._line.places_ahead(request.session, request.priority)
        return self._rates.expected_wait_s(places, row_is_free=is_free)

    def _enqueue(self, row: _Row) -> None:
        self._line.enqueue(row.ticket, self._now_s)
        self._waiting[row.ticket] = row
        self._evenness.joined(row.ticket)

    def _admit(self) -> None:
        while (first := self._line.first(self._now_s)) is not None:
            giving_way = self._giving_way(self._waiting[first])
            if giving_way is None:
                return
            self._counts["displaced"] += len(giving_way)
            for row in giving_way:
                self._park(row)
            # Started at once: by now the first in line may be one that was parked for it.
            self._start(self._waiting.pop(first))

    def _giving_way(self, row: _Row) -> list[_Row] | None:
        """Rows to preempt so that this one can start; None if it has to wait."""
        going: list[_Row] = []
        staying = self._rows
        kv = self._kv + row.kv_tokens
        while not self._options.has_room(len(staying), kv):
            if not going:
                staying = dict(self._rows)
            victim = self._line.victim(staying, for_=row.ticket)
            if victim is None:
                return None
            going.append(staying.pop(victim))
            kv -= going[-1].held(self._step)
        return going

    def _start(self, row: _Row) -> None:
        self._line.start(row.ticket, self._now_s)
        self._evenness.left(row.ticket)
        if row.started_s < 0:
            row.started_s = self._now_s
        self._rows[row.ticket] = row
        self._kv += row.kv_tokens
        self._kept.take(row)
        if row.unread:
            self._reading.append(row)
        else:
            self._decode(row)

    def _decode(self, row: _Row) -> None:
        row.made_step = self._step
        row.end_step = self._step + row.request.output_tokens - row.made
        self._ends.setdefault(row.end_step, []).append(row)
        self._decoding += 1

    def _park(self, row: _Row) -> None:
        self._counts["parked"] += 1
        is_reading = row.end_step < 0
        self._leave_batch(row)
        held = row.kv_tokens - row.unread if is_reading else row.kv_tokens
        if not self._kept.keep(row, held):
            self._counts["reread"] += held
            row.unread = row.kv_tokens
        self._enqueue(row)

    def _leave_batch(self, row: _Row) -> None:
        self._settle(row)
        self._kv -= row.kv_tokens
        del self._rows[row.ticket]
        if row.end_step < 0:
            self._reading.remove(row)
            return
        self._ends[row.end_step].remove(row)
        row.end_step = -1
        self._decoding -= 1

    def _run_step(self) -> bool:
        """Run one step; returns whether a row may have become free."""
        options = self._options
        read = self._read(options.prefill_chunk)
        decoding = self._decoding
        seconds = self._machine.step_s(decoding, self._kv, read)
        self._now_s += seconds
        self._step += 1
        self._kv += decoding
        self._counts["made"] += decoding
        self._rates.note_step(read, decoding, seconds)
        ended = list(self._ends.get(self._step, ()))
        for row in ended:
            self._end(row)
        self._ends.pop(self._step, None)
        while self._reading and not self._reading[0].unread:
            self._decode(self._reading.popleft())
        if self._step % CHARGE_STEPS == 0:
            for row in self._rows.values():
                self._settle(row)
            if isinstance(self._line, ServiceOrder):
                self._line.prefill_cost = self._rates.prefill_cost
        parked = False
        while self._kv + self._decoding > options.kv_tokens and len(self._rows) > 1:
            victim = self._line.victim(self._rows)
            assert victim is not None, "somebody runs"
            self._park(self._rows[victim])
            parked = True
        self._counts["kv_max"] = max(self._counts["kv_max"], self._kv)
        return bool(ended) or parked

    def _read(self, tokens_max: int) -> int:
        left = tokens_max
        for row in self._reading:
            if not left:
                break
            read = min(left, row.unread)
            row.unread -= read
            left -= read
            fresh = min(read, row.to_charge)
            if fresh:
                row.to_charge -= fresh
                self._charge(row, fresh, 0)
        return tokens_max - left

    def _settle(self, row: _Row) -> None:
        """Advance its tokens to this step, and charge them."""
        made = row.settle(self._step)
        if made:
            self._charge(row, 0, made)

    def _charge(self, row: _Row, read: int, made: int) -> None:
        self._line.charge(row.ticket, read, made)
        self._evenness.served(row.ticket, read * self._machine.prefill_cost + made)

    def _end(self, row: _Row) -> None:
        self._leave_batch(row)
        self._line.withdraw(row.ticket)
        self._rates.note_end(row.made)
        arrival_s = row.request.arrival_s
        self._outcomes.append(
            Outcome(row.request, row.started_s - arrival_s, self._now_s - arrival_s, row.estimate_s)
        )
