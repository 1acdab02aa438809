"""Brings requests to the worker, and back to it when it has restarted or forgotten them."""

from __future__ import annotations

from math import inf

from zmqengine.errors import DeadlineExceeded, WorkerLost, ZmqEngineError
from zmqengine.protocol.messages import Accepted
from zmqengine_client.core.calls import CallTable
from zmqengine_client.core.connection import Connection, Opening
from zmqengine_client.core.events import ClientEvent
from zmqengine_client.core.inserts import insert_message, refusal, size_refusal
from zmqengine_client.core.live_requests import LiveRequests
from zmqengine_client.core.phases import RequestEvent, RequestPhase
from zmqengine_client.core.request import Request
from zmqengine_client.core.session_config import SessionConfig

RETRY_AFTER_S = 0.25
RETRIED_AFTER_RESTART = ("not_ready", "overloaded")


class Inserting:
    """Sends inserts, takes their answers. Only while the connection is live."""

    def __init__(
        self, config: SessionConfig, connection: Connection, calls: CallTable, live: LiveRequests
    ) -> None:
        self._config = config
        self._connection = connection
        self._calls = calls
        self._live = live
        self._put_off: set[Request] = set()
        # A bound from below: whoever was put off may have left since.
        self.due_at = inf

    def insert(self, request: Request, now: float) -> None:
        """Send it, unless it has come to its end, or the worker would refuse it."""
        connection = self._connection
        assert connection.limits is not None
        request.retry_at = inf
        error = refusal(request, connection.limits, connection.model)
        if error is None and now >= request.deadline_at:
            error = DeadlineExceeded("deadline_ms passed before the last token")
        if error is not None:
            self._live.end(request, error=error)
            return
        request.end = request.ends_by_itself(connection.eos_token_ids)
        if request.end is not None:
            self._live.end(request)
            return
        if request.id in self._live.acks:
            self._live.acks.flush(now)
        call = self._calls.prepare(
            lambda call: insert_message(call, connection.epoch, request, now), now, request
        )
        error = size_refusal(call.frames[1], connection.limits)
        if error is not None:
            self._live.end(request, error=error)
            return
        request.follow(RequestEvent.INSERTED)
        request.inserted_tokens = len(request.tokens)
        self._calls.start(call, now)

    def restore(self, request: Request, opening: Opening, now: float) -> None:
        """The connection is live, and the worker does not hold this request."""
        if request.phase is RequestPhase.WAITING:
            self.insert(request, now)
        elif not (self._config.resume or not (opening.restarted or request.may_have_run)):
            error = WorkerLost("the worker died while it generated; resume is off")
            self._live.end(request, error=error)
        elif not opening.same_model:
            self._live.end(request, error=WorkerLost("the worker came back with another model"))
        else:
            if opening.restarted:
                self._tell_resumed(request)
            self.insert(request, now)

    def insert_forgotten(self, request: Request, now: float) -> None:
        """The worker lives and does not know the request any more."""
        if self._config.resume:
            self.insert(request, now)
        else:
            self._live.end(request, error=WorkerLost("the worker forgot the request; resume is off"))

    def accepted(self, request: Request, accepted: Accepted) -> None:
        """The worker holds the request."""
        if request.may(RequestEvent.ACCEPTED):
            request.follow(RequestEvent.ACCEPTED)
            request.was_accepted = True
            request.seed = accepted.seed

    def rejected(self, request: Request, error: ZmqEngineError, now: float) -> None:
        """The worker does not take the request: the end of it, unless it had run in another worker before."""
        has_run = request.may_have_run or request.resumed > 0
        if request.aborting:
            self._live.end(request, finish="abort")
        elif not has_run or error.code not in RETRIED_AFTER_RESTART:
            self._live.end(request, error=error)
        elif now - max(self._connection.phase_since, request.added_at) >= self._config.worker_lost_timeout_s:
            error = WorkerLost(f"the restarted worker has no room: {error.message}")
            self._live.end(request, error=error)
        elif request.may(RequestEvent.REFUSED_FOR_NOW):
            request.follow(RequestEvent.REFUSED_FOR_NOW)
            wait_s = RETRY_AFTER_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            request.retry_at = now + wait_s
            self._put_off.add(request)
            self.due_at = min(self.due_at, request.retry_at)

    def go_down(self) -> None:
        """The connection is lost: who was put off is inserted with all the others."""
        self._put_off.clear()
        self.due_at = inf

    def advance(self, now: float) -> None:
        """Insert again what was put off."""
        if now < self.due_at:
            return
        self._put_off = {one for one in self._put_off if one.phase is RequestPhase.PUT_OFF}
        for request in [one for one in self._put_off if now >= one.retry_at]:
            self._put_off.discard(request)
            self.insert(request, now)
        self.due_at = min((one.retry_at for one in self._put_off), default=inf)

    def _tell_resumed(self, request: Request) -> None:
        request.resumed += 1
        outbox = self._calls.outbox
        outbox.counters.resumed_streams += 1
        outbox.events.append(ClientEvent("resumed", f"continues at token {len(request.tokens)}", request.id))
