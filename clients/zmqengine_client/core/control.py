"""Calls on ctl: describe, ping, status, tokenizer, metrics, drain, and waiting until the worker is ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from math import inf

from zmqengine.errors import Draining, ZmqEngineError, from_code
from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import ControlReply, ControlRequest, Describe, Description, Rejected
from zmqengine_client.core.outbox import Listener, Outbox, Send
from zmqengine_client.core.presence import Patience, Presence

RETRY_S = 1.0
DESCRIBE_FIRST_S = 0.02
DESCRIBE_MAX_S = 0.2


class DescribeLoop:
    """Repeats `describe` until it is stopped. `ids` numbers all calls on ctl."""

    def __init__(self, outbox: Outbox, ids: Iterator[int]) -> None:
        self._outbox = outbox
        self._ids = ids
        self._wait_s = DESCRIBE_FIRST_S
        self._from_id = 0
        self.due_at = inf

    def begin(self, now: float) -> None:
        """Send `describe` repeatedly until `stop`. Replies to earlier ones no longer count."""
        if self.due_at == inf:
            self.begin_anew(now, wait=False)

    def begin_anew(self, now: float, *, wait: bool) -> None:
        """Start over, at once or after a wait, which paces failing attempts."""
        self._from_id = next(self._ids)
        self._wait_s = DESCRIBE_MAX_S if wait else DESCRIBE_FIRST_S
        self.due_at = now + DESCRIBE_MAX_S
        if not wait:
            self._describe(now)

    def stop(self) -> None:
        """Send no more."""
        self.due_at = inf

    def once(self) -> None:
        """Send one `describe`, without waiting for the reply."""
        self._outbox.actions.append(Send("ctl", encode(Describe(next(self._ids)))))

    def answers(self, call_id: int) -> bool:
        """Whether this call belongs to the running loop. If so, the loop goes on at its slowest pace."""
        if call_id < self._from_id:
            return False
        self._wait_s = DESCRIBE_MAX_S
        return True

    def advance(self, now: float) -> None:
        """Send `describe` if it is due."""
        if now >= self.due_at:
            self._describe(now)

    def _describe(self, now: float) -> None:
        self.once()
        self.due_at = now + self._wait_s
        self._wait_s = min(DESCRIBE_MAX_S, 2 * self._wait_s)


class ControlCall:
    """A call on ctl and, later, its `result` or `error`.

    With `make` None it sends nothing of its own and ends with the Description of a worker that is ready.
    """

    def __init__(
        self,
        make: Callable[[int], ControlRequest] | None,
        listener: Listener | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.make = make
        self.listener = listener
        self.timeout_s = timeout_s
        self.changed = False
        self.result: ControlReply | None = None
        self.error: ZmqEngineError | None = None
        self.started_at = 0.0
        self.retry_at = inf
        self.id = 0

    @property
    def done(self) -> bool:
        """Whether it has a result or an error."""
        return self.result is not None or self.error is not None


class Control:
    """The ctl socket's side of a client."""

    def __init__(self, outbox: Outbox, presence: Presence, patience: Patience) -> None:
        self._outbox = outbox
        self._presence = presence
        self._patience = patience
        self._ids = count(1)
        self._calls: dict[int, ControlCall] = {}
        self._ready_waiters: list[ControlCall] = []
        self.describing = DescribeLoop(outbox, self._ids)

    def start(self, call: ControlCall, now: float) -> None:
        """Send the call."""
        call.started_at = now
        call.id = next(self._ids)
        if call.make is None:
            self._ready_waiters.append(call)
            self.describing.begin(now)
        else:
            self._calls[call.id] = call
            self._ask(call, now)

    @property
    def is_busy(self) -> bool:
        """Whether a call waits for its answer, or for a worker that is ready."""
        return bool(self._calls or self._ready_waiters)

    def stop_describing(self) -> None:
        """Stop describing: the session is open, or none is needed."""
        if not self._ready_waiters:
            self.describing.stop()

    def receive(self, reply: ControlReply, now: float) -> Description | None:
        """Complete the call that this reply answers. Returns a description if it is current."""
        self._presence.heard_at = now
        call = self._calls.pop(reply.call, None)
        if call is not None:
            if isinstance(reply, Rejected):
                error = from_code(reply.code, reply.message, retry_after_ms=reply.retry_after_ms)
                self._settle(call, error=error)
            else:
                self._settle(call, result=reply)
        if not isinstance(reply, Description) or not self.describing.answers(reply.call):
            return None
        self._presence.described(reply, now)
        if reply.state == "ready":
            self._settle_waiters(result=reply)
        elif reply.state == "draining":
            self._settle_waiters(error=Draining("the worker takes no new requests"))
        return reply

    def close(self, error: ZmqEngineError) -> None:
        """End every waiting call with `error`."""
        for call in list(self._calls.values()):
            self._settle(call, error=error)
        self._calls.clear()
        self._settle_waiters(error=error)
        self.describing.stop()

    def advance(self, now: float) -> None:
        """Repeat calls that are due, give up those past their time-out."""
        for call in list(self._calls.values()):
            if now >= self._give_up_at(call):
                del self._calls[call.id]
                self._settle(call, error=self._patience.control_error(now - call.started_at))
            elif now >= call.retry_at:
                self._ask(call, now)
        for call in list(self._ready_waiters):
            error = self._patience.opening_error(call.started_at, now, call.timeout_s)
            if error is not None:
                self._ready_waiters.remove(call)
                self._settle(call, error=error)
        self.describing.advance(now)

    def next_deadline(self) -> float:
        """The earliest time at which `advance` has something to do."""
        due = [self.describing.due_at]
        due += [min(call.retry_at, self._give_up_at(call)) for call in self._calls.values()]
        # Waiting calls are checked with every describe; only a shorter time-out of their own is due earlier.
        due += [
            call.started_at + call.timeout_s for call in self._ready_waiters if call.timeout_s is not None
        ]
        return min(due)

    def _give_up_at(self, call: ControlCall) -> float:
        return call.started_at + self._patience.control_timeout_s(call.timeout_s)

    def _ask(self, call: ControlCall, now: float) -> None:
        assert call.make is not None
        call.retry_at = now + RETRY_S
        self._outbox.actions.append(Send("ctl", encode(call.make(call.id))))

    def _settle(
        self, call: ControlCall, *, result: ControlReply | None = None, error: ZmqEngineError | None = None
    ) -> None:
        call.result, call.error = result, error
        self._outbox.mark(call)

    def _settle_waiters(
        self, *, result: ControlReply | None = None, error: ZmqEngineError | None = None
    ) -> None:
        waiters, self._ready_waiters = self._ready_waiters, []
        for call in waiters:
            self._settle(call, result=result, error=error)
