"""Batching delay: how long an idle worker waits for more requests before it starts a batch, as Nagle's algorithm does.

A step that prefills one short prompt costs nearly as much as a step that prefills all of them, and a request that
arrives during a step waits for its end. Requests come in bursts, with messages some milliseconds apart, and requests
that were answered together are followed by others together: a burst once split over two steps would stay split.
"""

from __future__ import annotations

LOOK_S = 0.0003
"""Seconds between two polls for more requests. Of eight clients on one machine that were answered together, the next
requests arrive at most this far apart in nine of ten bursts; a single request waits no longer than this, and a text to
embed not at all if it follows one that was alone."""
WAIT_S_MAX = 0.005
"""Bound on the delay, in seconds. In 99 of 100 such bursts the last request arrives within 4 ms."""
AGAIN_S = 0.05
"""Seconds after an answer within which the next request comes from a program: a person takes longer to read."""


class BatchingDelay:
    """Decides how often to look for more requests, and when to stop looking. Reads no clock."""

    def __init__(self) -> None:
        self._ended = 0
        self._emptied_s = 0.0

    def emptied(self, ended: int, now_s: float) -> None:
        """Record that a step ended the last rows, `ended` of them at once."""
        self._ended, self._emptied_s = ended, now_s

    def looks_max(self, step_s: float | None) -> int:
        """Maximum number of polls, given the seconds of a decode step; 0 while that is unknown.

        A request that misses the start waits half a step on average: a longer delay cannot pay.
        """
        return 0 if step_s is None else int(min(WAIT_S_MAX, step_s / 2) / LOOK_S)

    def is_sequel(self, step_s: float | None, now_s: float) -> bool:
        """Whether a request that arrives is probably the next one of a program that was answered alone just now.

        Where rows decode the answer is False: a burst that is split there stays split for more than a step.
        """
        return step_s is None and self._ended == 1 and self._is_again(now_s)

    def expects_more(self, waiting: int, came: int, now_s: float) -> bool:
        """Whether more requests are likely before the next poll, given that `came` of the `waiting` arrived since the
        last one."""
        again = self._ended if self._is_again(now_s) else 0
        return waiting < again or (came > 0 and waiting > max(1, again))

    def _is_again(self, now_s: float) -> bool:
        return now_s - self._emptied_s <= AGAIN_S
