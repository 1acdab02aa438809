"""Asks ctl again and again which worker is there, until nobody needs to know."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import Describe
from zmqengine_client.core.actions import Send
from zmqengine_client.core.outbox import Outbox

FIRST_S = 0.02
MAX_S = 0.2


class DescribeLoop:
    """The pace of the questions. `ids` are the numbers of all calls on ctl."""

    def __init__(self, outbox: Outbox, ids: Iterator[int]) -> None:
        self._outbox = outbox
        self._ids = ids
        self._wait_s = FIRST_S
        self._from_id = 0
        self.due_at = inf

    def begin(self, now: float) -> None:
        """Describe now and again until `stop`. Answers to earlier questions no longer count."""
        if self.due_at == inf:
            self.begin_anew(now, wait=False)

    def begin_anew(self, now: float, *, wait: bool) -> None:
        """Begin again, at once or, so that failing attempts keep a pace, after a wait."""
        self._from_id = next(self._ids)
        self._wait_s = MAX_S if wait else FIRST_S
        self.due_at = now + MAX_S
        if not wait:
            self._describe(now)

    def stop(self) -> None:
        """Nobody needs to know."""
        self.due_at = inf

    def once(self) -> None:
        """Ask which worker this is, without waiting for the answer."""
        self._outbox.actions.append(Send("ctl", encode(Describe(next(self._ids)))))

    def answers(self, call_id: int) -> bool:
        """Whether the answer to this call is not older than the loop. From here on a steady pace will do."""
        if call_id < self._from_id:
            return False
        self._wait_s = MAX_S
        return True

    def advance(self, now: float) -> None:
        """Ask if it is time."""
        if now >= self.due_at:
            self._describe(now)

    def _describe(self, now: float) -> None:
        self.once()
        self.due_at = now + self._wait_s
        self._wait_s = min(MAX_S, 2 * self._wait_s)
