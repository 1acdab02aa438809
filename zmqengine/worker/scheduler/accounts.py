"""Accounts of engine steps: requests are charged for their share, and service rates are measured."""

from __future__ import annotations

from zmqengine.engine.interface import RowDraft, RowPrefill
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.scheduler.admission import Admission
from zmqengine.worker.telemetry.counters import Counters


class Accounts:
    """Notes what became of each row in a step; `admission` goes by it."""

    def __init__(self, counters: Counters, admission: Admission) -> None:
        self._counters = counters
        self._order = admission.order
        self._rates = admission.rates
        self._read_tokens = self._accepted_tokens = 0

    def charge(self, request: LiveRequest) -> None:
        """Charge a request for the tokens that were made for it since the last time."""
        made = len(request.log) - request.charged_tokens
        if made:
            request.charged_tokens += made
            self._order.charge(request.ticket, 0, made)

    def draft(self, request: LiveRequest | None, draft: RowDraft) -> None:
        """Tokens were proposed for a row, whose request may be gone."""
        _, source, proposed, accepted = draft
        self._counters.count_draft(source, proposed, accepted)
        self._accepted_tokens += accepted
        if request is not None:
            before = request.drafts.get(source, (0, 0))
            request.drafts[source] = (before[0] + proposed, before[1] + accepted)

    def prefill(self, request: LiveRequest, prefill: RowPrefill) -> None:
        """A part of its prompt was read."""
        _, done, total, cached = prefill
        if not request.prefilled_tokens:
            self._start(request, total, cached)
        read = done - max(request.prefilled_tokens, cached)
        if read > 0:
            self._read_tokens += read
            # What a parked row reads again is not its session's doing.
            first_time = done - max(request.prefilled_tokens, cached, request.read_tokens)
            if first_time > 0:
                self._order.charge(request.ticket, first_time, 0)
        request.prefilled_tokens = done

    def step(self, decode_tokens: int, step_ns: int) -> float | None:
        """A step is over. Returns how fast prompts are read, in tokens a second, if this one told of it."""
        read_tokens, self._read_tokens = self._read_tokens, 0
        # A row makes one token of its own, and those of its drafts that were accepted.
        rows, self._accepted_tokens = max(1, decode_tokens - self._accepted_tokens), 0
        self._rates.note_step(read_tokens, decode_tokens, step_ns / 1e9, rows)
        if not read_tokens:
            return None
        self._order.prefill_cost = self._rates.prefill_cost
        return self._rates.prefill_tokens_per_s

    def end(self, request: LiveRequest) -> None:
        """A request is about to end."""
        self.charge(request)
        if request.ticket.has_started:
            self._rates.note_end(len(request.log))

    def _start(self, request: LiveRequest, total: int, cached: int) -> None:
        counters = self._counters
        if request.prefill_pass < 0:
            request.cached_tokens = min(cached, request.prompt_tokens)
            request.prefill_pass = counters.passes
            self._rates.note_prompt(total, cached)
            waited = request.prefill_pass - request.arrival_pass + 1
            counters.admission_wait_passes_max = max(counters.admission_wait_passes_max, waited)
        # Every row reads one token to start from, the last one it holds.
        counters.tokens_read_again += max(0, min(request.read_tokens, total - 1) - cached)
