"""The requests of a session that have not ended: added, filled with published tokens, resumed, ended."""

from __future__ import annotations

from collections.abc import Iterator

from zmqengine.errors import Conflict, ZmqEngineError
from zmqengine.protocol.messages import (
    End,
    Finish,
    Replay,
    Resume,
    TokenFrame,
    TokenRow,
    Watermark,
    WatermarkRow,
)
from zmqengine_client.core.calls import Acknowledgements, CallTable
from zmqengine_client.core.chunks import PromptProgress
from zmqengine_client.core.connection import Connection
from zmqengine_client.core.phases import Phase, RequestEvent, RequestPhase
from zmqengine_client.core.request import Request

MISSING_MAX = 5


class LiveRequests:
    """Live requests by id. Each gets its tokens in order and without a gap: `resume` asks for missing ones.

    `acks` collects the ends to acknowledge to the worker.
    """

    def __init__(self, connection: Connection, calls: CallTable) -> None:
        self.by_id: dict[str, Request] = {}
        self.acks = Acknowledgements(calls)
        self._connection = connection
        self._calls = calls
        self._outbox = calls.outbox
        self._frames_seen: int | None = None

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        """A snapshot of the live requests, which may end during the iteration."""
        return iter(tuple(self.by_id.values()))

    def add(self, request: Request, now: float) -> None:
        """Add a request, unless it has ended. A duplicate id ends the new one."""
        if request.ended:
            return
        request.added_at = now
        if request.options.deadline_ms is not None:
            request.deadline_at = now + request.options.deadline_ms / 1000
        if request.id in self.by_id:
            self.end(request, error=Conflict(f"request {request.id!r} is running; choose another id"))
        else:
            self.by_id[request.id] = request

    def end(
        self, request: Request, *, finish: Finish | None = None, error: ZmqEngineError | None = None
    ) -> None:
        """End a live request: with `finish`, with an error, or with the `end` it received."""
        request.follow(RequestEvent.ENDED)
        if finish is not None:
            request.end = End(finish, prompt_tokens=len(request.prompt))
        request.error = error
        request.ahead.clear()
        if self.by_id.get(request.id) is request:
            del self.by_id[request.id]
        self._outbox.mark(request)

    def abort_all(self) -> None:
        """End every request with `abort`: the client is being closed."""
        for request in self:
            self.end(request, finish="abort")

    def fail_all(self, error: ZmqEngineError) -> None:
        """End every request with this error, each with an exception object of its own."""
        for request in self:
            self.end(request, error=type(error)(error.message, retry_after_ms=error.retry_after_ms))

    # --- from the worker ------------------------------------------------------------------------------------

    def go_live(self) -> None:
        """Restart the count of frames."""
        self._frames_seen = None

    def receive(self, frame: TokenFrame, now: float) -> None:
        """Append each row of the frame to its request."""
        outbox, requests = self._outbox, self.by_id
        self._count_frame(frame.n)
        for row in frame.rows:
            request = requests.get(row.request)
            if request is None:
                if row.end is not None:
                    self.acks.add(row.request, now)
            elif (
                row.end is None
                and row.logprobs is None
                and row.vectors is None
                and row.first_index == len(request.tokens)
            ):
                # The fast path of the usual row: 20,000 a second.
                request.tokens.extend(row.tokens)
                outbox.counters.tokens += len(row.tokens)
                if not request.changed:
                    request.changed = True
                    outbox.changed.append(request)
            else:
                self._row(request, row, now)
        for progress in frame.progress:
            request = requests.get(progress.request)
            if request is not None:
                request.progress = PromptProgress(progress.done, progress.total, progress.cached)
                outbox.mark(request)

    def receive_watermark(self, watermark: Watermark, now: float) -> None:
        """Resume the requests that are behind the worker."""
        seen = set()
        for row in watermark.rows:
            seen.add(row.request)
            request = self.by_id.get(row.request)
            if request is not None:
                self.catch_up(request, row, now)
            elif row.ended:
                self.acks.add(row.request, now)
        self._look_for_missing(seen, now)

    def catch_up(self, request: Request, row: WatermarkRow, now: float) -> None:
        """Resume the request if the worker is ahead of it."""
        if row.ended or row.next_index > request.have:
            self.resume(request, now)

    def receive_replay(self, request: Request, replay: Replay, now: float) -> None:
        """Fill a gap, then append the rows kept since."""
        request.resuming = False
        before = request.have
        self._row(request, replay.row, now)
        if not request.ended and (replay.more or (request.ahead and request.have > before)):
            self.resume(request, now)

    def resume(self, request: Request, now: float) -> None:
        """Request the tokens from the first missing one on."""
        if request.resuming or request.ended or request.phase is RequestPhase.PUT_OFF:
            return
        if self._connection.phase is not Phase.LIVE:
            return
        request.resuming = True
        epoch, have = self._connection.epoch, request.have
        self._calls.send(lambda call: Resume(call, request.id, epoch, have), now, request)

    def _row(self, request: Request, row: TokenRow, now: float) -> None:
        have = len(request.tokens)
        known = request.receive(row)
        if known < 0:
            self._outbox.counters.gaps += not request.resuming
            self.resume(request, now)
            return
        self._outbox.counters.duplicate_tokens += known
        if request.ahead:
            request.receive_kept()
        self._outbox.counters.tokens += len(request.tokens) - have
        if request.end is not None:
            self.end(request)
            self.acks.add(request.id, now)
        else:
            self._outbox.mark(request)

    def _look_for_missing(self, seen: set[str], now: float) -> None:
        """Insert again requests that several watermarks in a row did not name: the worker has lost them."""
        for request in self:
            if request.phase is not RequestPhase.ACCEPTED or request.id in seen:
                request.missing = 0
                continue
            request.missing += 1
            if request.missing >= MISSING_MAX:
                request.missing = 0
                self.resume(request, now)

    def _count_frame(self, n: int) -> None:
        counters = self._outbox.counters
        counters.frames += 1
        if self._frames_seen is not None and n > self._frames_seen + 1:
            counters.frames_lost += n - self._frames_seen - 1
        self._frames_seen = n
