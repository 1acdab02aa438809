"""Outgoing frames: the new tokens of every session, one frame a session a pass."""

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
"""Maximum tokens of one frame: bounds the frame, and the time of one session in a pass."""
LAG_RETRY_S = 0.02
"""Seconds between two attempts to send to a reader whose queue is full."""


class _SessionOutput:
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
    """Owns every token from its step until it is acknowledged: unsent tokens, and those held for a replay.

    A full socket (EAGAIN) leaves the cursors unchanged: the session lags, the others continue, and the next frame that
    is sent contains everything in between.
    """

    def __init__(self, context: WorkerContext, socket: zmq.Socket[bytes]) -> None:
        self._epoch = context.epoch
        self._socket = socket
        self._drop_share = context.config.fault_drop_frames
        self._random = random.Random(0)
        self._outputs: dict[str, _SessionOutput] = {}
        self._news: dict[_SessionOutput, None] = {}
        self.frames = 0
        self.lags = 0

    # --- sessions come and go ---

    def open(self, session: Session) -> None:
        """Start to send to this session."""
        self._outputs[session.id] = _SessionOutput(session)

    def close(self, session: Session) -> None:
        """Send what the socket still takes, and drop the session with its output."""
        output = self._outputs.pop(session.id)
        if output.unsent or output.progress:
            self._publish(output)
        self._news.pop(output, None)

    def reopen(self, session: Session) -> None:
        """Send the session's output again from the start of its unacknowledged part: another connection has taken it
        over, under another topic."""
        self._outputs[session.id].lagging = False

    # --- what there is to tell ---

    def accept(self, request: LiveRequest) -> None:
        """Hold the output of a new request, its `emitted` tokens included."""
        self._outputs[request.session_id].held_bytes += request.log.nbytes

    def token(self, request: LiveRequest, token: int, logprobs: TokenLogprobs | None) -> None:
        output = self._outputs[request.session_id]
        output.held_bytes += request.tokens.append(token, logprobs)
        output.unsent[request] = None
        self._news[output] = None

    def vectors(self, request: LiveRequest, vectors: np.ndarray) -> None:
        """Append vectors of the next texts of a request."""
        output = self._outputs[request.session_id]
        request.vectors.append(vectors)
        output.unsent[request] = None
        self._news[output] = None

    def progress(self, request: LiveRequest, done: int, total: int, cached: int) -> None:
        """Set the progress of a request's prefill. Only the latest is sent."""
        output = self._outputs[request.session_id]
        output.progress[request] = (done, total, cached)
        self._news[output] = None

    def ended(self, request: LiveRequest) -> None:
        """Send a request's terminal answer."""
        output = self._outputs[request.session_id]
        output.unsent[request] = None
        output.progress.pop(request, None)
        self._news[output] = None

    def forget(self, request: LiveRequest) -> None:
        """Drop an ended request that was acknowledged or exceeds the bound on held output."""
        output = self._outputs[request.session_id]
        output.held_bytes -= request.log.nbytes
        output.unsent.pop(request, None)
        output.progress.pop(request, None)

    def forget_sent(self, request: LiveRequest) -> None:
        """Drop log-probabilities of a request that were sent."""
        self._outputs[request.session_id].held_bytes -= request.log.forget_sent()

    # --- telling ---

    def flush(self, now_s: float) -> None:
        """Send one frame to each session with new output; a lagging one is retried a little later."""
        for output in list(self._news):
            if output.lagging and now_s < output.retry_s:
                continue
            output.retry_s = now_s + LAG_RETRY_S
            if self._publish(output):
                del self._news[output]

    def grant(self, session: Session) -> None:
        """Send the welcome of a session whose subscription is in force."""
        self._send(self._outputs[session.id], Granted(self._epoch, session.id))

    def watermark(self, session: Session) -> None:
        """Send a session the watermarks of its requests."""
        if session.is_granted:
            output = self._outputs[session.id]
            self._send(output, Watermark(self._epoch, output.frames, session.watermarks()))

    def fatal(self, message: str) -> None:
        """Send every session its unsent output, and the notice that the worker is about to exit."""
        for output in self._outputs.values():
            self._publish(output)
            self._send(output, Fatal(self._epoch, message))

    # --- how it stands ---

    def held_bytes(self, session: Session) -> int:
        """Bytes of output kept for a session until it acknowledges."""
        return self._outputs[session.id].held_bytes

    @property
    def all_held_bytes(self) -> int:
        """Bytes of output kept for all sessions until they acknowledge."""
        return sum(output.held_bytes for output in self._outputs.values())

    def backlog_tokens(self, session: Session) -> int:
        """Unsent tokens of a session whose socket is full, a log-probability counted as one; 0 without a lag."""
        output = self._outputs[session.id]
        if not output.lagging:
            return 0
        return sum((len(request.log) - request.log.sent) * request.log.weight for request in output.unsent)

    def next_retry_s(self) -> float | None:
        """Time of the next retry of a lagging session, or None."""
        due = [output.retry_s for output in self._news if output.session.is_granted]
        return min(due) if due else None

    # --- frames ---

    def _publish(self, output: _SessionOutput) -> bool:
        """Send new output to one session; returns whether all of it was sent."""
        if not output.session.is_granted:
            return False
        rows, left_over = _rows(output.unsent)
        progress = [ProgressRow(request.id, *where) for request, where in output.progress.items()]
        if not self._send(output, TokenFrame(self._epoch, output.frames, rows, progress), may_drop=True):
            return False
        output.progress.clear()
        for request, row in list(zip(output.unsent, rows, strict=False)):
            request.log.sent = row.first_index + row.count
            request.end_sent = row.end is not None
            if left_over and request.log.sent == len(request.log):
                del output.unsent[request]
        if not left_over:
            output.unsent.clear()
        return not left_over

    def _send(self, output: _SessionOutput, message: Message, *, may_drop: bool = False) -> bool:
        header, body = encode(message)
        if may_drop and self._drop_share and self._random.random() < self._drop_share:
            output.frames += 1
            return True
        try:
            self._socket.send_multipart([output.session.topic, header, body], zmq.DONTWAIT)
        except zmq.Again:
            if not output.lagging:
                output.lagging = True
                self.lags += 1
            return False
        output.lagging = False
        self.frames += 1
        if isinstance(message, TokenFrame):
            output.frames += 1
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
        # The rest of the budget may be less than one entry.
        if until < stop or budget <= 0:
            return rows, until < stop or len(rows) < len(unsent)
    return rows, False
