"""The requests of a session, and their reaction to aborts, replies and changes of the connection."""

from __future__ import annotations

from math import inf

from zmqengine.errors import AnswerTimeout, ImageWanted, ZmqEngineError, from_code
from zmqengine.protocol.messages import Abort, Accepted, Embed, Image, Insert, Rejected, Replay, Resume
from zmqengine_client.core.calls import CallTable, CommandCall
from zmqengine_client.core.connection import Connection, Opening, SessionConfig
from zmqengine_client.core.inserting import Inserting
from zmqengine_client.core.live_requests import LiveRequests
from zmqengine_client.core.phases import Phase, RequestEvent, RequestPhase
from zmqengine_client.core.request import Request


class RequestTable:
    """All requests of a session: `live` has the unfinished ones, `inserting` sends them to the worker.

    It sends only while the connection is live; `go_live` reconciles the worker's requests with these.
    """

    def __init__(self, config: SessionConfig, connection: Connection, calls: CallTable) -> None:
        self._connection = connection
        self._calls = calls
        self.live = LiveRequests(connection, calls)
        self.inserting = Inserting(config, connection, calls, self.live)

    def abort(self, request: Request, now: float) -> None:
        """Abort a request in any phase. It ends at once if the worker does not hold it."""
        if request.ended or request.aborting:
            return
        request.aborting = True
        if self._connection.phase is Phase.LIVE and request.phase is not RequestPhase.WAITING:
            self._calls.send(lambda call: Abort(call, request.id), now, request)
        else:
            # If the worker still holds it after a reconnect, it is an orphan there and aborted then.
            self.live.end(request, finish="abort")

    # --- the connection comes and goes ---------------------------------------------------------------------

    def go_live(self, opening: Opening, now: float) -> None:
        """Insert waiting requests, resume interrupted ones, abort orphans at the worker."""
        self.live.go_live()
        for request_id in opening.held.keys() - self.live.by_id.keys():
            self._abort_orphan(request_id, now)
        for request in self.live:
            held = None if opening.restarted else opening.held.get(request.id)
            if held is not None and request.may(RequestEvent.HELD):
                request.follow(RequestEvent.HELD)
                self.live.catch_up(request, held, now)
            else:
                self.inserting.restore(request, opening, now)

    def go_down(self) -> None:
        """The connection is lost: no reply can arrive any more."""
        self.live.acks.clear()
        self.inserting.go_down()
        for request in self.live:
            request.resuming = False
            request.ahead.clear()
            if request.aborting:
                self.live.end(request, finish="abort")

    # --- from cmd ------------------------------------------------------------------------------------------

    def receive_accepted(self, accepted: Accepted, call: CommandCall, now: float) -> None:
        """The worker holds the request."""
        request = call.request
        if request is None or request.ended:
            return
        self.inserting.accepted(request, accepted)
        if accepted.state == "ended" and call.retries:
            self.live.resume(request, now)

    def receive_replay(self, replay: Replay, call: CommandCall, now: float) -> None:
        """Missed tokens, sent again."""
        if call.request is not None and not call.request.ended:
            self.live.receive_replay(call.request, replay, now)

    def receive_rejected(self, rejected: Rejected, call: CommandCall, now: float) -> None:
        """Rejection of a command of one request. Those of the session are handled before this is called."""
        request = call.request
        if request is None or request.ended:
            return
        if call.kind is Insert and rejected.code == ImageWanted.code:
            self.inserting.want_images(request, rejected, now)
        elif call.kind in (Insert, Image, Embed):
            self.inserting.rejected(request, _error(rejected), now)
        elif call.kind is Abort:
            self.live.end(request, finish="abort")
        elif call.kind is Resume:
            request.resuming = False
            if rejected.code == "unknown_request":
                self.inserting.insert_forgotten(request, now)

    def gave_up(self, call: CommandCall, now: float) -> None:
        """A command was repeated and got no reply."""
        request = call.request
        if request is None or request.ended:
            return
        if call.kind is Abort:
            self.live.end(request, finish="abort")
        elif call.kind is Resume or request.have == request.inserted_tokens:
            silence = now - call.sent_at
            error = AnswerTimeout(
                f"no answer to {call.kind.__name__.lower()} of {request.id!r} in {silence:.1f} s; "
                "the worker may be busy or hang: see its log, or give a longer answer_timeout_s"
            )
            self.live.end(request, error=error)
            self._abort_orphan(request.id, now)

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Acknowledge ended requests; insert deferred ones again."""
        if self._connection.phase is Phase.LIVE:
            self.live.acks.advance(now)
            self.inserting.advance(now)

    def next_deadline(self) -> float:
        """The time at which `advance` has something to do."""
        if self._connection.phase is not Phase.LIVE:
            return inf
        return min(self.live.acks.due_at, self.inserting.due_at)

    def _abort_orphan(self, request_id: str, now: float) -> None:
        """Abort a request that only the worker knows; it is acknowledged when its end arrives."""
        if self._connection.phase is Phase.LIVE:
            self._calls.send(lambda call: Abort(call, request_id), now)


def _error(rejected: Rejected) -> ZmqEngineError:
    return from_code(rejected.code, rejected.message, retry_after_ms=rejected.retry_after_ms)
