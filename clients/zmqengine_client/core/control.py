"""Calls on ctl: describe, ping, status, tokenizer, metrics, drain, and waiting until the worker is ready."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import inf

from zmqengine.errors import (
    AnswerTimeout,
    Draining,
    ModelLoadError,
    NotReady,
    WorkerLost,
    ZmqEngineError,
    from_code,
)
from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import ControlReply, ControlRequest, Describe, Description, Rejected
from zmqengine_client.core.actions import Listener, Outbox, Send

DESCRIBE_FIRST_S = 0.02
DESCRIBE_MAX_S = 0.2
RETRY_S = 1.0


class ControlCall:
    """A question on ctl and, in time, its answer: `result` or `error`.

    With `make` None it asks nothing of its own and is answered with the Description of a worker that is ready.
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
        """Whether it is answered."""
        return self.result is not None or self.error is not None


class Control:
    """The ctl socket's side of a client.

    `heard_at` is when ctl last said something, `lost_at` when a worker that was there was seen to go, `progressed_at`
    when a worker that is getting ready was last further than before.
    """

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        *,
        connect_timeout_s: float,
        answer_timeout_s: float,
        ready_timeout_s: float | None,
    ) -> None:
        self._address = address
        self._outbox = outbox
        self._connect_timeout_s = connect_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._ready_timeout_s = inf if ready_timeout_s is None else ready_timeout_s
        self._ids = count(1)
        self._calls: dict[int, ControlCall] = {}
        self._ready_waiters: list[ControlCall] = []
        self._describe_at = inf
        self._describe_wait_s = DESCRIBE_FIRST_S
        self._describe_from_id = 0
        self.description: Description | None = None
        self.heard_at = -inf
        self.lost_at = -inf
        self.progressed_at = -inf
        self.connected = False
        self.handshake_failures = 0

    # --- the connection comes and goes ---------------------------------------------------------------------

    def came_up(self) -> None:
        """The connection is up, its handshake done."""
        self.connected = True
        self.handshake_failures = 0

    def broke(self, now: float) -> bool:
        """The connection broke; says whether a worker had been there."""
        was_there, self.connected = self.connected, False
        # Workers that come up and never say a word do not prolong the wait for one that does.
        if was_there and (self.lost_at == -inf or self.heard_at > self.lost_at):
            self.lost_at = now
        return was_there

    # --- what is asked -------------------------------------------------------------------------------------

    def start(self, call: ControlCall, now: float) -> None:
        """Ask."""
        call.started_at = now
        call.id = next(self._ids)
        if call.make is None:
            self._ready_waiters.append(call)
            self.keep_describing(now)
        else:
            self._calls[call.id] = call
            self._ask(call, now)

    def keep_describing(self, now: float) -> None:
        """Describe now and again until `stop_describing`. Answers to earlier questions no longer count."""
        if self._describe_at == inf:
            self.describe_again(now, wait=False)

    def describe_again(self, now: float, *, wait: bool) -> None:
        """Begin the describe loop anew, at once or, so that failing attempts keep a pace, after a wait."""
        self._describe_from_id = next(self._ids)
        self._describe_wait_s = DESCRIBE_MAX_S if wait else DESCRIBE_FIRST_S
        self._describe_at = now + DESCRIBE_MAX_S
        if not wait:
            self._describe(now)

    def stop_describing(self) -> None:
        """The session is open, or nobody needs one."""
        if not self._ready_waiters:
            self._describe_at = inf

    def describe_once(self) -> None:
        """Ask which worker this is, without waiting for the answer."""
        self._outbox.actions.append(Send("ctl", encode(Describe(next(self._ids)))))

    # --- what is answered ----------------------------------------------------------------------------------

    def receive(self, reply: ControlReply, now: float) -> Description | None:
        """Give the reply to whom it is for. A description that is not older than the loop is returned too."""
        self.heard_at = now
        call = self._calls.pop(reply.call, None)
        if call is not None:
            if isinstance(reply, Rejected):
                error = from_code(reply.code, reply.message, retry_after_ms=reply.retry_after_ms)
                self._settle(call, error=error)
            else:
                self._settle(call, result=reply)
        if not isinstance(reply, Description) or reply.call < self._describe_from_id:
            return None
        if reply.state in ("loading", "warming") and _how_far(reply) != _how_far(self.description):
            self.progressed_at = now
        self.description = reply
        # The loading worker was told apart from a silent one: from here on a steady pace will do.
        self._describe_wait_s = DESCRIBE_MAX_S
        if reply.state == "ready":
            self._settle_waiters(result=reply)
        elif reply.state == "draining":
            self._settle_waiters(error=Draining("the worker takes no new requests"))
        return reply

    def close(self, error: ZmqEngineError) -> None:
        """Answer everybody who still waits with `error`."""
        for call in list(self._calls.values()):
            self._settle(call, error=error)
        self._calls.clear()
        self._settle_waiters(error=error)
        self._describe_at = inf

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Ask again what is due, give up what is over time."""
        for call in list(self._calls.values()):
            if now >= self._give_up_at(call):
                del self._calls[call.id]
                self._settle(call, error=self._silence(call, now))
            elif now >= call.retry_at:
                self._ask(call, now)
        for call in list(self._ready_waiters):
            error = self.opening_error(call.started_at, now, call.timeout_s)
            if error is not None:
                self._ready_waiters.remove(call)
                self._settle(call, error=error)
        if now >= self._describe_at:
            self._describe(now)

    def next_deadline(self) -> float:
        """When `advance` has something to do, at the earliest."""
        due = [self._describe_at]
        due += [min(call.retry_at, self._give_up_at(call)) for call in self._calls.values()]
        # Waiters are looked at with every describe; only a short time-out of their own is due earlier.
        due += [
            call.started_at + call.timeout_s for call in self._ready_waiters if call.timeout_s is not None
        ]
        return min(due)

    def opening_error(
        self, since: float, now: float, timeout_s: float | None = None
    ) -> ZmqEngineError | None:
        """Why somebody who waits since `since` for a worker that is ready has waited long enough, if so."""
        waited = now - since
        silent = now - max(since, self.heard_at)
        description = self.description if self.heard_at > since else None
        connect_s = self._connect_timeout_s if timeout_s is None else min(timeout_s, self._connect_timeout_s)
        if description is None or silent >= self._connect_timeout_s:
            return self.lost_error(silent) if silent >= connect_s else None
        if description.state == "failed" and waited >= connect_s:
            return ModelLoadError(description.message or "the worker could not load its model")
        if (
            waited >= (self._ready_timeout_s if timeout_s is None else timeout_s)
            and description.state != "ready"
        ):
            return NotReady(
                f"the worker at {self._address} is still {description.state} after {waited:.1f} s"
                f" ({description.progress.stage}); wait longer with ready_timeout_s",
                retry_after_ms=1000,
            )
        return None

    def lost_error(self, silent_s: float) -> WorkerLost:
        """Nobody answers: what the user can do about it."""
        keys = "; the handshake failed: check the keys" if self.handshake_failures else ""
        return WorkerLost(
            f"no worker has answered at {self._address} for {silent_s:.1f} s{keys}: "
            "is it running? Start it with: zmqengine worker",
            retry_after_ms=1000,
        )

    def gave_up_error(self, gone_s: float, now: float) -> ZmqEngineError:
        """Why streams that had a worker are given up: it does not come back, or gets no further at its start."""
        description = self.description
        if (
            description is None
            or now - self.heard_at >= self._connect_timeout_s
            or description.state == "ready"
        ):
            return self.lost_error(gone_s)
        return WorkerLost(
            f"the worker at {self._address} was started again and has been {description.state} "
            f"({description.progress.stage}) for {gone_s:.1f} s without getting further: see its log",
            retry_after_ms=1000,
        )

    def _give_up_at(self, call: ControlCall) -> float:
        if call.timeout_s is not None:
            return call.started_at + call.timeout_s
        heard_before = self.heard_at > -inf
        return call.started_at + (self._answer_timeout_s if heard_before else self._connect_timeout_s)

    def _silence(self, call: ControlCall, now: float) -> ZmqEngineError:
        waited = now - call.started_at
        if self.connected and self.heard_at > -inf:
            return AnswerTimeout(
                f"the worker at {self._address} has not answered for {waited:.1f} s; it may hang: "
                "see its log, or restart it"
            )
        return self.lost_error(waited)

    def _ask(self, call: ControlCall, now: float) -> None:
        assert call.make is not None
        call.retry_at = now + RETRY_S
        self._outbox.actions.append(Send("ctl", encode(call.make(call.id))))

    def _describe(self, now: float) -> None:
        self.describe_once()
        self._describe_at = now + self._describe_wait_s
        self._describe_wait_s = min(DESCRIBE_MAX_S, 2 * self._describe_wait_s)

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


def _how_far(description: Description | None) -> object:
    return description and (description.epoch, description.state, description.progress)
