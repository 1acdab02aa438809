"""Keepalive of a live session, and detection of a dead worker or a dead subscription."""

from __future__ import annotations

from math import inf
from typing import Literal

from zmqengine.protocol.messages import Ping
from zmqengine_client.core.calls import CallTable, CommandCall

DOUBT_S = 2.0
"""After this time without a reply to a command, the client describes the worker on ctl."""
DOUBT_AGAIN_S = 1.0
SILENCE_S = 5.0
"""After this silence on out the client pings: watermarks arrive every second while there are requests."""
CHECK_S = 1.0
STOPPED_S = 10.0
"""Time between two advances after which this process counts as stopped: the next one is due after `SILENCE_S`."""

Verdict = Literal["alive", "describe", "gone", "deaf"]


class Liveness:
    """Timers of one live session: when to ping, when to doubt, when to give up.

    After silence on out a ping on cmd tells a dead worker (no answer within `gone_s`) from a dead subscription (an
    answer, and still nothing on out). Time in which this process was stopped is no silence: nothing could be heard.
    """

    def __init__(self, calls: CallTable, *, gone_s: float) -> None:
        self._calls = calls
        self._gone_s = gone_s
        self._lease_s = inf
        self._doubt_at = 0.0
        self._out_heard_at = 0.0
        self._check_at = 0.0
        self._advanced_at = 0.0
        self._probe: CommandCall | None = None
        self._probe_answered_at = inf
        self.heard_at = 0.0

    def begin(self, lease_s: float) -> None:
        """A session is live; the message that opened it counts as heard."""
        self._lease_s = lease_s
        self._probe = None

    def heard_output(self, now: float) -> None:
        """A message arrived on out."""
        self.heard_at = self._out_heard_at = now
        self._probe = None

    def heard_reply(self, call: CommandCall | None, now: float) -> None:
        """A reply to `call` arrived on cmd."""
        self.heard_at = now
        if call is not None and call is self._probe:
            self._probe_answered_at = now

    def gave_up(self, call: CommandCall) -> None:
        """A call was given up without a reply."""
        if call is self._probe:
            self._probe = None

    def advance(self, now: float, *, has_requests: bool) -> Verdict:
        """Ping if it is due; returns the verdict on the silence."""
        if now - self._advanced_at >= STOPPED_S:
            self.heard_at = self._out_heard_at = now
            self._probe = None
        self._advanced_at = now
        if now >= self._ping_at():
            self._calls.send(Ping, now)
        if not has_requests:
            self._out_heard_at = now
        elif now >= self._check_at and now - self._out_heard_at >= SILENCE_S:
            self._check_at = now + CHECK_S
            if now - self.heard_at >= self._gone_s:
                return "gone"
            if self._probe is None:
                self._probe_answered_at = inf
                self._probe = self._calls.send(Ping, now)
            elif now - self._probe_answered_at >= SILENCE_S:
                return "deaf"
        waiting_since = self._calls.waiting_since()
        if waiting_since is not None and now - waiting_since >= DOUBT_S and now >= self._doubt_at:
            self._doubt_at = now + DOUBT_AGAIN_S
            return "describe"
        return "alive"

    def next_deadline(self, *, has_requests: bool) -> float:
        """When `advance` has something to do. Doubt is left to the repetition of the commands."""
        silence_at = max(self._check_at, self._out_heard_at + SILENCE_S) if has_requests else inf
        return min(self._ping_at(), silence_at)

    def _ping_at(self) -> float:
        return self._calls.last_sent_at + self._lease_s / 3
