"""The requests of a session: inserted, filled from frames, resumed after gaps and worker deaths, acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from zmqengine.errors import (
    AnswerTimeout,
    Conflict,
    DeadlineExceeded,
    WorkerLost,
    ZmqEngineError,
    from_code,
)
from zmqengine.protocol.messages import (
    Abort,
    Accepted,
    End,
    Finish,
    Insert,
    Rejected,
    Replay,
    Resume,
    TokenFrame,
    TokenRow,
    Watermark,
)
from zmqengine_client.core.acknowledgements import Acknowledgements
from zmqengine_client.core.actions import Outbox
from zmqengine_client.core.calls import Call, CallTable
from zmqengine_client.core.chunks import PromptProgress
from zmqengine_client.core.connection import Connection, Opening, Phase
from zmqengine_client.core.events import ClientEvent
from zmqengine_client.core.inserts import insert_message, refusal, size_refusal
from zmqengine_client.core.request import Request, RequestPhase

MISSING_MAX = 5
RETRY_AFTER_S = 0.25
RETRIED_AFTER_RESTART = ("not_ready", "overloaded")


class RequestTable:
    """Every request that has not ended, by id.

    It sends only while the connection is live; `go_live` brings the worker up to date.
    """

    def __init__(
        self, connection: Connection, calls: CallTable, outbox: Outbox, *, resume: bool, room_timeout_s: float
    ) -> None:
        self._connection = connection
        self._calls = calls
        self._outbox = outbox
        self._resume_after_death = resume
        self._room_timeout_s = room_timeout_s
        self._requests: dict[str, Request] = {}
        self._retrying: set[Request] = set()
        self.acks = Acknowledgements(calls)
        self._frames_seen: int | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def unfinished(self) -> Iterable[Request]:
        """The requests that have not ended."""
        return tuple(self._requests.values())

    # --- from the caller -----------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a request; it is inserted as soon as the connection is live. One that has ended is left alone."""
        if request.ended:
            return
        request.added_at = now
        if request.options.deadline_ms is not None:
            request.deadline_at = now + request.options.deadline_ms / 1000
        if request.id in self._requests:
            self._end(request, error=Conflict(f"request {request.id!r} is running; choose another id"))
            return
        self._requests[request.id] = request
        if self._connection.phase is Phase.LIVE:
            self._insert(request, now)

    def abort(self, request: Request, now: float) -> None:
        """End a request whatever its phase. It ends here at once if the worker does not hold it."""
        if request.ended or request.aborting:
            return
        request.aborting = True
        if self._connection.phase is Phase.LIVE and request.phase is not RequestPhase.WAITING:
            self._calls.send(lambda call: Abort(call, request.id), now, request)
        else:
            # If the worker still holds it when it is found again, it is an orphan there and aborted then.
            self._end(request, finish="abort")

    # --- the connection comes and goes ---------------------------------------------------------------------

    def go_live(self, opening: Opening, now: float) -> None:
        """Insert what waits, go on with what was cut off, abort what nobody here wants."""
        self._frames_seen = None
        for request_id in opening.held.keys() - self._requests.keys():
            self._abort_orphan(request_id, now)
        for request in self.unfinished():
            self._restore(request, opening, now)

    def go_down(self) -> None:
        """The connection is lost: no reply is on its way any more."""
        self.acks.clear()
        self._retrying.clear()
        for request in self.unfinished():
            request.resuming = False
            request.ahead.clear()
            if request.aborting:
                self._end(request, finish="abort")

    def fail_all(self, error: ZmqEngineError) -> None:
        """End every request with this error, each with an exception object of its own."""
        for request in self.unfinished():
            own = type(error)(error.message, retry_after_ms=error.retry_after_ms)
            self._end(request, error=own)

    def fail(self, request: Request, error: ZmqEngineError) -> None:
        """End one request here, and in the worker if it can be told."""
        self._end(request, error=error)

    def end_all(self) -> None:
        """The client is being closed: that aborts what runs."""
        for request in self.unfinished():
            self._end(request, finish="abort")

    # --- from out ------------------------------------------------------------------------------------------

    def receive_frame(self, frame: TokenFrame, now: float) -> None:
        """Give each row to its request."""
        outbox, requests = self._outbox, self._requests
        self._count_frame(frame.n)
        for row in frame.rows:
            request = requests.get(row.request)
            if request is None:
                if row.end is not None:
                    self.acks.add(row.request, now)
            elif row.end is None and row.logprobs is None and row.first_index == len(request.tokens):
                # The usual row, on its short way: 20,000 a second pass here.
                request.tokens.extend(row.tokens)
                outbox.counters.tokens += len(row.tokens)
                if not request.changed:
                    request.changed = True
                    outbox.changed.append(request)
            else:
                self._receive_row(request, row, now)
        for progress in frame.progress:
            request = requests.get(progress.request)
            if request is not None:
                request.progress = PromptProgress(progress.done, progress.total, progress.cached)
                outbox.mark(request)

    def receive_watermark(self, watermark: Watermark, now: float) -> None:
        """Resume what is behind."""
        seen = set()
        for row in watermark.rows:
            seen.add(row.request)
            request = self._requests.get(row.request)
            if request is None:
                if row.ended:
                    self.acks.add(row.request, now)
            elif row.ended or row.next_index > len(request.tokens):
                self._resume(request, now)
        self._look_for_missing(seen, now)

    # --- from cmd ------------------------------------------------------------------------------------------

    def receive_accepted(self, accepted: Accepted, call: Call, now: float) -> None:
        """The worker holds the request."""
        request = call.request
        if request is None or request.ended:
            return
        request.phase = RequestPhase.ACCEPTED
        request.was_accepted = True
        request.seed = accepted.seed
        if accepted.state == "ended" and call.retries:
            self._resume(request, now)

    def receive_replay(self, replay: Replay, call: Call, now: float) -> None:
        """Fill a gap, then go on with what was kept meanwhile."""
        request = call.request
        if request is None or request.ended:
            return
        request.resuming = False
        before = len(request.tokens)
        self._receive_row(request, replay.row, now)
        if request.ended or not (replay.more or (request.ahead and len(request.tokens) > before)):
            return
        self._resume(request, now)

    def receive_rejected(self, rejected: Rejected, call: Call, now: float) -> None:
        """Refusals that concern one request. What concerns the session is handled before this is called."""
        request = call.request
        if request is None or request.ended:
            return
        error = from_code(rejected.code, rejected.message, retry_after_ms=rejected.retry_after_ms)
        if call.kind is Insert:
            self._insert_rejected(request, error, now)
        elif call.kind is Resume and rejected.code == "unknown_request":
            self._reinsert(request, now)
        elif call.kind is Abort:
            self._end(request, finish="abort")
        elif call.kind is Resume:
            request.resuming = False

    def gave_up(self, call: Call, now: float) -> None:
        """A command was repeated and never answered."""
        request = call.request
        if request is None or request.ended:
            return
        if call.kind is Abort:
            self._end(request, finish="abort")
        elif call.kind is Resume or len(request.tokens) == request.inserted_tokens:
            silence = now - call.sent_at
            self._end(
                request,
                error=AnswerTimeout(
                    f"no answer to {call.kind.__name__.lower()} of {request.id!r} in {silence:.1f} s; "
                    "the worker may be busy or hang: see its log, or give a longer answer_timeout_s"
                ),
            )
            self._abort_orphan(request.id, now)

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Acknowledge what has ended; insert again what was put off."""
        if self._connection.phase is not Phase.LIVE:
            return
        self.acks.advance(now)
        for request in [request for request in self._retrying if now >= request.retry_at]:
            self._retrying.discard(request)
            if not request.ended:
                self._insert(request, now)

    def next_deadline(self) -> float:
        """When `advance` has something to do."""
        if self._connection.phase is not Phase.LIVE:
            return inf
        return min([self.acks.due_at, *(request.retry_at for request in self._retrying)])

    # --- inserting -----------------------------------------------------------------------------------------

    def _restore(self, request: Request, opening: Opening, now: float) -> None:
        if request.phase is RequestPhase.WAITING:
            self._insert(request, now)
            return
        held = opening.held.get(request.id)
        if held is not None and not opening.restarted:
            request.phase = RequestPhase.ACCEPTED
            if held.ended or held.next_index > len(request.tokens):
                self._resume(request, now)
            return
        may_go_on = self._resume_after_death or not (opening.restarted or request.may_have_run)
        if not may_go_on:
            self._end(request, error=WorkerLost("the worker died while it generated; resume is off"))
        elif not opening.same_model:
            self._end(request, error=WorkerLost("the worker came back with another model"))
        else:
            if opening.restarted:
                request.resumed += 1
                self._outbox.counters.resumed_streams += 1
                self._outbox.events.append(
                    ClientEvent("resumed", f"goes on at token {len(request.tokens)}", request.id)
                )
            self._insert(request, now)

    def _reinsert(self, request: Request, now: float) -> None:
        """The worker lives and does not know the request any more."""
        request.resuming = False
        if self._resume_after_death:
            self._insert(request, now)
        else:
            self._end(request, error=WorkerLost("the worker forgot the request; resume is off"))

    def _insert(self, request: Request, now: float) -> None:
        connection = self._connection
        assert connection.limits is not None
        request.retry_at = inf
        error = refusal(request, connection.limits, connection.model)
        if error is None and now >= request.deadline_at:
            error = DeadlineExceeded("deadline_ms passed before the last token")
        if error is not None:
            self._end(request, error=error)
            return
        request.end = request.ends_by_itself(connection.eos_token_ids)
        if request.end is not None:
            self._end(request)
            return
        if request.id in self.acks:
            self.acks.flush(now)
        call = self._calls.prepare(
            lambda call: insert_message(call, connection.epoch, request, now), now, request
        )
        error = size_refusal(call.frames[1], connection.limits)
        if error is not None:
            self._end(request, error=error)
            return
        request.phase = RequestPhase.INSERTING
        request.inserted_tokens = len(request.tokens)
        self._calls.start(call, now)

    def _insert_rejected(self, request: Request, error: ZmqEngineError, now: float) -> None:
        if request.aborting:
            self._end(request, finish="abort")
        elif (request.may_have_run or request.resumed) and error.code in RETRIED_AFTER_RESTART:
            waited_s = now - max(self._connection.phase_since, request.added_at)
            if waited_s < self._room_timeout_s:
                wait_s = RETRY_AFTER_S if error.retry_after_ms is None else error.retry_after_ms / 1000
                request.retry_at = now + wait_s
                self._retrying.add(request)
            else:
                self._end(request, error=WorkerLost(f"the restarted worker has no room: {error.message}"))
        else:
            self._end(request, error=error)

    # --- receiving -----------------------------------------------------------------------------------------

    def _receive_row(self, request: Request, row: TokenRow, now: float) -> None:
        have = len(request.tokens)
        known = request.receive(row)
        if known < 0:
            self._outbox.counters.gaps += not request.resuming
            self._resume(request, now)
            return
        self._outbox.counters.duplicate_tokens += known
        if request.ahead:
            request.receive_kept()
        self._outbox.counters.tokens += len(request.tokens) - have
        if request.end is not None:
            self._end(request)
            self.acks.add(request.id, now)
        else:
            self._outbox.mark(request)

    def _resume(self, request: Request, now: float) -> None:
        if request.resuming or request.ended or self._connection.phase is not Phase.LIVE:
            return
        if request in self._retrying:
            return
        request.resuming = True
        epoch, have = self._connection.epoch, len(request.tokens)
        self._calls.send(lambda call: Resume(call, request.id, epoch, have), now, request)

    def _look_for_missing(self, seen: set[str], now: float) -> None:
        """A watermark that does not name an accepted request, time and again, means that it is forgotten."""
        for request in self.unfinished():
            if request.phase is not RequestPhase.ACCEPTED or request.id in seen:
                request.missing = 0
                continue
            request.missing += 1
            if request.missing >= MISSING_MAX:
                request.missing = 0
                self._resume(request, now)

    def _count_frame(self, n: int) -> None:
        counters = self._outbox.counters
        counters.frames += 1
        if self._frames_seen is not None and n > self._frames_seen + 1:
            counters.frames_lost += n - self._frames_seen - 1
        self._frames_seen = n

    # --- ending --------------------------------------------------------------------------------------------

    def _end(
        self, request: Request, *, finish: Finish | None = None, error: ZmqEngineError | None = None
    ) -> None:
        if finish is not None:
            request.end = End(finish, prompt_tokens=len(request.prompt))
        request.error = error
        request.phase = RequestPhase.ENDED
        request.ahead.clear()
        if self._requests.get(request.id) is request:
            del self._requests[request.id]
        self._retrying.discard(request)
        self._outbox.mark(request)

    def _abort_orphan(self, request_id: str, now: float) -> None:
        """Abort what the worker holds and nobody here waits for; it is acknowledged when its end comes."""
        if self._connection.phase is Phase.LIVE:
            self._calls.send(lambda call: Abort(call, request_id), now)
