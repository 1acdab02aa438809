"""Measured rates of service, and estimates from them: costs, waits, deadlines, hints when to retry."""

from __future__ import annotations

from typing import NamedTuple

from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import PREFILL_COST

MEMORY_S = 20.0
"""Half-life of a measurement, in seconds of service."""
MEASURED_MIN_S = 0.25
"""Seconds of service before a rate is known: first steps compile and warm up."""
PREFILL_COST_BOUNDS = (1 / 256, 4.0)
"""Bounds on the measured cost of prefill, so that one wrong measurement cannot make prompts free or dominate all
costs."""
RETRY_BOUNDS_MS = (100, 60_000)
"""Least and most milliseconds of the advice to try again."""
RETRY_UNKNOWN_MS = 1_000
"""The advice before any speed was measured."""
DEADLINE_MARGIN = 1.5
"""A request is refused only if its estimate exceeds the time it has by this factor: a test holds estimates to be within
it of what requests take."""
_KEEP = 0.98
"""Decay of prompt and output lengths with each request: about the last 50 count."""


class Estimate(NamedTuple):
    """Estimated time to a request's end. `met`: within its deadline, which it is without a deadline or data."""

    met: bool
    wait_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    left_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from now to the last token."""
        return self.wait_s + self.prefill_s + self.decode_s

    def __str__(self) -> str:
        return (
            f"it would take about {self.total_s * 1000:,.0f} ms ({self.wait_s * 1000:,.0f} in line, "
            f"{self.prefill_s * 1000:,.0f} to read the prompt, {self.decode_s * 1000:,.0f} to answer) "
            f"and has {self.left_s * 1000:,.0f} ms: give it more time or lower max_tokens"
        )


class _Ratio:
    """A rate: the ratio of two sums that decay with seconds of service, so many short steps count like a long one."""

    __slots__ = ("amount", "seconds")

    def __init__(self) -> None:
        self.amount = 0.0
        self.seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        keep = 0.5 ** (seconds / MEMORY_S)
        self.amount = self.amount * keep + amount
        self.seconds = self.seconds * keep + seconds

    @property
    def per_s(self) -> float | None:
        if self.seconds < MEASURED_MIN_S or self.amount <= 0:
            return None
        return self.amount / self.seconds


class ServiceRates:
    """Exponentially weighted rates of prefill, decode and finished requests, updated after each step. Reads no clock.

    Only seconds of work count: an idle worker forgets nothing. For costs, a step that both prefills and
    decodes is split: the time of a decode step counts as decode, the rest as prefill. For durations it is not split:
    a row that prefills waits for the rows that decode in the same step, and they for it.
    """

    def __init__(self) -> None:
        self._prefill = _Ratio()
        self._steps = _Ratio()
        self._decode = _Ratio()
        self._read_pace = _Ratio()
        self._row_pace = _Ratio()
        self._endings = _Ratio()
        self._outputs = 0.0
        self._outputs_count = 0.0
        self._prompts = 0.0
        self._cached = 0.0

    def note_step(
        self, prefill_tokens: int, decode_tokens: int, seconds: float, rows: int | None = None
    ) -> None:
        """Record an engine step: prompt tokens prefilled, tokens decoded by `rows`, and seconds.

        Without `rows`, each row decoded one token.
        """
        if seconds <= 0:
            return
        self._endings.note(0.0, seconds)
        if prefill_tokens:
            self._read_pace.note(prefill_tokens, seconds)
        if decode_tokens:
            self._row_pace.note(decode_tokens / (rows or decode_tokens), seconds)
        decode_s = seconds
        if prefill_tokens:
            decode_s = min(self.step_s or 0.0, seconds) if decode_tokens else 0.0
            self._prefill.note(prefill_tokens, seconds - decode_s)
        elif decode_tokens:
            self._steps.note(1.0, seconds)
        if decode_tokens and decode_s:
            self._decode.note(decode_tokens, decode_s)

    def note_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Record how much of a prompt came from the prefix cache."""
        self._prompts = self._prompts * _KEEP + prompt_tokens
        self._cached = self._cached * _KEEP + cached_tokens

    def note_end(self, output_tokens: int) -> None:
        """Record the end, for any reason, of a request that had a row."""
        self._endings.note(1.0, 0.0)
        self._outputs = self._outputs * _KEEP + output_tokens
        self._outputs_count = self._outputs_count * _KEEP + 1

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens prefilled in a second of prefill; None until known."""
        return self._prefill.per_s

    @property
    def step_s(self) -> float | None:
        """Seconds of a step that only decodes; None until known."""
        return None if self._steps.per_s is None else 1 / self._steps.per_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens decoded in a second of decode, by all rows together; None until known."""
        return self._decode.per_s

    @property
    def row_tokens_per_s(self) -> float | None:
        """Tokens that one row decodes in a second of service, prefill of others included; None until known."""
        return self._row_pace.per_s

    @property
    def read_tokens_per_s(self) -> float | None:
        """Tokens prefilled in a second of service, decode of others included; None until known."""
        return self._read_pace.per_s

    @property
    def endings_per_s(self) -> float | None:
        """Requests that finish in a second of service; None until one has."""
        return self._endings.per_s

    @property
    def prefill_cost(self) -> float:
        """Cost of prefilling a token relative to decoding one, for `ServiceOrder.prefill_cost`."""
        if self.prefill_tokens_per_s is None or self.decode_tokens_per_s is None:
            return PREFILL_COST
        low, high = PREFILL_COST_BOUNDS
        return min(high, max(low, self.decode_tokens_per_s / self.prefill_tokens_per_s))

    def expected_wait_s(self, places_ahead: int, *, row_is_free: bool = False) -> float | None:
        """Seconds until a request with `places_ahead` gets a row; None until a request has finished.

        0 if a row is free: the requests ahead of it start without delay.
        """
        if row_is_free:
            return 0.0
        return None if self.endings_per_s is None else (places_ahead + 1) / self.endings_per_s

    def retry_after_ms(self, places: int = 1) -> int:
        """Milliseconds until `places` waiting requests have started, from 100 ms to a minute.

        Until a request has finished, the running ones are expected to take as long again as they have taken.
        """
        if self.endings_per_s is not None:
            wait_s = places / self.endings_per_s
        elif self._endings.seconds >= MEASURED_MIN_S:
            wait_s = places * self._endings.seconds
        else:
            return RETRY_UNKNOWN_MS
        low, high = RETRY_BOUNDS_MS
        return min(high, max(low, round(wait_s * 1000)))

    def meets_deadline(
        self, ticket: Ticket, now_s: float, *, places_ahead: int, row_is_free: bool = False
    ) -> Estimate:
        """Whether a request can be expected to end before its deadline; unknown parts of the estimate count as 0."""
        if ticket.deadline_s is None:
            return Estimate(True)
        wait_s = self.expected_wait_s(places_ahead, row_is_free=row_is_free) or 0.0
        unread = ticket.prompt_tokens * (1 - self._cached / self._prompts if self._prompts else 1)
        prefill_s = unread / self.read_tokens_per_s if self.read_tokens_per_s else 0.0
        output = self._expected_output(ticket)
        decode_s = output / self.row_tokens_per_s if self.row_tokens_per_s else 0.0
        left_s = max(0.0, ticket.deadline_s - now_s)
        met = wait_s + prefill_s + decode_s <= DEADLINE_MARGIN * left_s
        return Estimate(met, wait_s, prefill_s, decode_s, left_s)

    def _expected_output(self, ticket: Ticket) -> float:
        """The usual output length, or `max_tokens` if lower: most requests end before their limit."""
        if not self._outputs_count:
            return 0.0
        usual = self._outputs / self._outputs_count
        return usual if ticket.max_tokens is None else min(usual, ticket.max_tokens)
