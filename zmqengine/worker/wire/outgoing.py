"""Outgoing frames: new tokens of every session, one frame a session a pass."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import zmq

from zmqengine.engine.interface import TokenLogprobs
from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import Fatal, Granted, Message, ProgressRow, TokenFrame, TokenRow, Watermark
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.wire.session import Session

if TYPE_CHECKING:
    import numpy as np

FRAME_TOKENS_MAX = 16_384
"""Tokens in one catch-up frame: bounds the frame, and the time one session takes in a pass."""
LAG_RETRY_S = 0.02


class _Desk:
    """Unsent output of one session, and the state of its socket."""

    __slots__ = ("frames", "held_bytes", "lagging", "progress", "retry_s", "session", "unsent")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unsent: dict[LiveRequest, None] = {}
        self.progress: dict[LiveRequest, tuple[int, int, int]] = {}
        self.frames = 0
        self.lagging = False
        self.retry_s = 0.0
        self.held_bytes = 0


class Outgoing:
    """Owns every token from the step that made it until it is forgotten: what is unsent, what is held for a replay.

    A full socket (EAGAIN) leaves the cursors where they are: the session lags, the others go on, and the next
    frame that gets through holds everything in between.
    """

    def __init__(self, context: WorkerContext, socket: zmq.Socket[bytes]) -> None:
        self._epoch = context.epoch
        self._socket = socket
        self._drop_share = context.config.fault_drop_frames
        self._random = random.Random(0)
        self._desks: dict[str, _Desk] = {}
        self._news: dict[_Desk, None] = {}
        self.frames = 0
        self.lags = 0

    # --- sessions come and go ---

    def open(self, session: Session) -> None:
        """From now on there is something to tell this session."""
        self._desks[session.id] = _Desk(session)

    def close(self, session: Session) -> None:
        """Send what can still be sent, and forget the session with all that is held for it."""
        desk = self._desks.pop(session.id)
        if desk.unsent or desk.progress:
            self._publish(desk)
        self._news.pop(desk, None)

    def reopen(self, session: Session) -> None:
        """Another connection has taken the session over, under another topic: it has been told nothing yet."""
        self._desks[session.id].lagging = False

    # --- what there is to tell ---

    def accept(self, request: LiveRequest) -> None:
        """Hold the output of a new request, the part it brought along included."""
        self._desks[request.session_id].held_bytes += request.log.nbytes

    def token(self, request: LiveRequest, token: int, logprobs: TokenLogprobs | None) -> None:
        """One more token of a request."""
        desk = self._desks[request.session_id]
        desk.held_bytes += request.tokens.append(token, logprobs)
        desk.unsent[request] = None
        self._news[desk] = None

    def vectors(self, request: LiveRequest, vectors: np.ndarray) -> None:
        """Vectors of the next texts of a request."""
        desk = self._desks[request.session_id]
        request.vectors.append(vectors)
        desk.unsent[request] = None
        self._news[desk] = None

    def progress(self, request: LiveRequest, done: int, total: int, cached: int) -> None:
        """How far its prompt is. Only the latest is told."""
        desk = self._desks[request.session_id]
        desk.progress[request] = (done, total, cached)
        self._news[desk] = None

    def ended(self, request: LiveRequest) -> None:
        """The request has its terminal answer."""
        desk = self._desks[request.session_id]
        desk.unsent[request] = None
        desk.progress.pop(request, None)
        self._news[desk] = None

    def forget(self, request: LiveRequest) -> None:
        """Drop an ended request that its session has acknowledged, or can be held for no longer."""
        desk = self._desks[request.session_id]
        desk.held_bytes -= request.log.nbytes
        desk.unsent.pop(request, None)
        desk.progress.pop(request, None)

    def forget_sent(self, request: LiveRequest) -> None:
        """Drop the log-probabilities that a request's session was sent."""
        self._desks[request.session_id].held_bytes -= request.log.forget_sent()

    # --- telling ---

    def flush(self, now_s: float) -> None:
        """One frame for each session that has news; one that lags is tried again a little later."""
        for desk in list(self._news):
            if desk.lagging and now_s < desk.retry_s:
                continue
            desk.retry_s = now_s + LAG_RETRY_S
            if self._publish(desk):
                del self._news[desk]

    def grant(self, session: Session) -> None:
        """Tell a session that its subscription is in force."""
        self._send(self._desks[session.id], Granted(self._epoch, session.id))

    def watermark(self, session: Session) -> None:
        """Tell a session how far each of its requests is."""
        if session.is_granted:
            desk = self._desks[session.id]
            self._send(desk, Watermark(self._epoch, desk.frames, session.watermarks()))

    def fatal(self, message: str) -> None:
        """Tell every session what it has not been told, and that the worker is about to exit."""
        for desk in self._desks.values():
            self._publish(desk)
            self._send(desk, Fatal(self._epoch, message))

    # --- how it stands ---

    def held_bytes(self, session: Session) -> int:
        """Bytes of output kept for a session until it acknowledges."""
        return self._desks[session.id].held_bytes

    @property
    def all_held_bytes(self) -> int:
        """Bytes of output kept for all sessions until they acknowledge."""
        return sum(desk.held_bytes for desk in self._desks.values())

    def backlog_tokens(self, session: Session) -> int:
        """Tokens made and not taken by the session's socket, a log-probability counted as one; 0 while it keeps up."""
        desk = self._desks[session.id]
        if not desk.lagging:
            return 0
        return sum((len(request.log) - request.log.sent) * request.log.weight for request in desk.unsent)

    def next_retry_s(self) -> float | None:
        """When a session that lags is tried again, or None."""
        due = [desk.retry_s for desk in self._news if desk.session.is_granted]
        return min(due) if due else None

    # --- frames ---

    def _publish(self, desk: _Desk) -> bool:
        """Send what is new to one session; returns whether all of it went out."""
        if not desk.session.is_granted:
            return False
        rows, left_over = _rows(desk.unsent)
        progress = [ProgressRow(request.id, *where) for request, where in desk.progress.items()]
        if not self._send(desk, TokenFrame(self._epoch, desk.frames, rows, progress), may_drop=True):
            return False
        desk.progress.clear()
        for request, row in list(zip(desk.unsent, rows, strict=False)):
            request.log.sent = row.first_index + row.count
            request.end_sent = row.end is not None
            if left_over and request.log.sent == len(request.log):
                del desk.unsent[request]
        if not left_over:
            desk.unsent.clear()
        return not left_over

    def _send(self, desk: _Desk, message: Message, *, may_drop: bool = False) -> bool:
        header, body = encode(message)
        if may_drop and self._drop_share and self._random.random() < self._drop_share:
            desk.frames += 1
            return True
        try:
            self._socket.send_multipart([desk.session.topic, header, body], zmq.DONTWAIT)
        except zmq.Again:
            if not desk.lagging:
                desk.lagging = True
                self.lags += 1
            return False
        desk.lagging = False
        self.frames += 1
        if isinstance(message, TokenFrame):
            desk.frames += 1
        return True


def _rows(unsent: dict[LiveRequest, None]) -> tuple[list[TokenRow], bool]:
    """The unsent rows of a session, up to a frame's worth, and whether some are left over."""
    rows: list[TokenRow] = []
    budget = FRAME_TOKENS_MAX
    for request in unsent:
        log = request.log
        start, stop = log.sent, len(log)
        if (stop - start) * log.weight > budget:
            until, end = start + max(1, budget // log.weight), None
        else:
            until, end = stop, request.end
        rows.append(log.row(request.id, start, until, end))
        budget -= (until - start) * log.weight
        # What is left of the budget may be less than one entry.
        if until < stop or budget <= 0:
            return rows, until < stop or len(rows) < len(unsent)
    return rows, False
