"""Histograms of the time that requests wait and run. Only the actor records values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from zmqengine.protocol import messages
from zmqengine.worker.requests.live_request import LiveRequest

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0,
)  # fmt: skip
TOKENS = (
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1e3,
    2e3,
    5e3,
    1e4,
    2e4,
    5e4,
    1e5,
    2e5,
    5e5,
    1e6,
)


class RunningHistogram:
    """Number of values within each bound, and the sum of all."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self) -> messages.Histogram:
        return messages.Histogram(list(self.bounds), list(self.counts), self.sum)


class Latencies:
    """Histograms over the requests of one life of the worker, by their names in `status`.

    `now_s` is the present time: the actor sets it at the start of a pass and when a step is done.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queue_s = RunningHistogram()
        self.prefill_s = RunningHistogram()
        self.time_to_first_token_s = RunningHistogram()
        self.inter_token_s = RunningHistogram()
        self.request_s = RunningHistogram()
        self.step_s = RunningHistogram()
        self.prompt_tokens = RunningHistogram(TOKENS)
        self.output_tokens = RunningHistogram(TOKENS)

    def admitted(self, request: LiveRequest) -> None:
        """Record that a request got a row. Only the first one counts: a row after a failure is not a new admission."""
        if request.admitted_s is None:
            request.admitted_s = self.now_s
            self.queue_s.observe(self.now_s - request.accepted_s)

    def stepped(self, requests: Sequence[LiveRequest]) -> None:
        """Record new tokens: a request is in `requests` once for each of its tokens."""
        now_s = self.now_s
        # Rows with a token in the last step have the same interval: count them together.
        since_s, streak = -1.0, 0
        for request in requests:
            last_s = request.last_token_s
            if last_s is None:
                request.first_token_s = now_s
                self.time_to_first_token_s.observe(now_s - request.accepted_s)
                self.prefill_s.observe(now_s - (request.admitted_s or request.accepted_s))
            elif last_s == since_s:
                streak += 1
            else:
                if streak:
                    self.inter_token_s.observe(now_s - since_s, streak)
                since_s, streak = last_s, 1
            request.last_token_s = now_s
        if streak:
            self.inter_token_s.observe(now_s - since_s, streak)

    def phases_ms(self, request: LiveRequest) -> tuple[float, float, float]:
        """Milliseconds that an ending request waited for a row, then for its first token, and then decoded."""
        accepted_s, now_s = request.accepted_s, self.now_s
        admitted_s = now_s if request.admitted_s is None else request.admitted_s
        first_s = now_s if request.first_token_s is None else request.first_token_s
        spans_s = (admitted_s - accepted_s, first_s - admitted_s, now_s - first_s)
        queue_ms, prefill_ms, decode_ms = (round(max(0.0, span_s) * 1000, 3) for span_s in spans_s)
        return queue_ms, prefill_ms, decode_ms

    def ended(self, request: LiveRequest) -> None:
        """Record a request's terminal answer."""
        self.request_s.observe(max(0.0, self.now_s - request.accepted_s))
        if not request.embeds:
            self.prompt_tokens.observe(request.prompt_tokens)
            self.output_tokens.observe(len(request.log))

    def snapshot(self) -> dict[str, messages.Histogram]:
        """Snapshots of all histograms, by name."""
        return {
            name: value.snapshot()
            for name, value in vars(self).items()
            if isinstance(value, RunningHistogram)
        }
