"""Token frames out: one a session a pass, and never a wait for a slow reader."""

from __future__ import annotations

import random
from typing import Any

import zmq

from zmqengine.protocol.codec import encode
from zmqengine.protocol.messages import Fatal, Granted, Message, ProgressRow, TokenFrame, TokenRow, Watermark
from zmqengine.worker.sessions import Session

FRAME_TOKENS_MAX = 16_384
"""Tokens in one catch-up frame: bounds the frame, and the time one session takes in a pass."""


class Publisher:
    """Publishes what each session has not been sent yet.

    A full socket (EAGAIN) leaves the cursors where they are: the session lags, the others go on, and the next
    frame that gets through holds everything in between.
    """

    def __init__(self, socket: zmq.Socket[bytes], epoch: bytes, *, drop_share: float = 0.0) -> None:
        self._socket = socket
        self._epoch = epoch
        self._drop_share = drop_share
        self._random = random.Random(0)
        self.frames = 0
        self.lags = 0

    def granted(self, session: Session) -> None:
        """Tell a session that its subscription is in force."""
        self._send(session, Granted(self._epoch, session.id))

    def publish(self, session: Session) -> bool:
        """Send what is new to one session; returns whether all of it went out."""
        if not session.is_granted:
            return False
        rows, left_over = _rows(session)
        progress = [ProgressRow(request.id, *where) for request, where in session.progress.items()]
        frame = TokenFrame(self._epoch, session.frames, rows, progress)
        if not self._send(session, frame, may_drop=True):
            return False
        session.progress.clear()
        sent = (
            list(zip(session.dirty, rows, strict=False))
            if left_over
            else zip(session.dirty, rows, strict=True)
        )
        for request, row in sent:
            request.log.sent = row.first_index + len(row.tokens)
            request.end_sent = row.end is not None
            if left_over and request.log.sent == len(request.log.tokens):
                del session.dirty[request]
        if not left_over:
            session.dirty.clear()
        return not left_over

    def watermark(self, session: Session) -> None:
        """Tell a session how far each of its requests is."""
        if session.is_granted:
            self._send(session, Watermark(self._epoch, session.frames, session.watermarks()))

    def fatal(self, session: Session, message: str) -> None:
        """Tell a session that the worker is about to exit."""
        self._send(session, Fatal(self._epoch, message))

    def _send(self, session: Session, message: Message, *, may_drop: bool = False) -> bool:
        header, body = encode(message)
        if may_drop and self._drop_share and self._random.random() < self._drop_share:
            session.frames += 1
            return True
        try:
            self._socket.send_multipart([session.topic, header, body], zmq.DONTWAIT)
        except zmq.Again:
            if not session.lagging:
                session.lagging = True
                self.lags += 1
            return False
        session.lagging = False
        self.frames += 1
        if isinstance(message, TokenFrame):
            session.frames += 1
        return True


def _rows(session: Session) -> tuple[list[TokenRow], bool]:
    """The unsent rows of a session, up to a frame's worth, and whether some are left over."""
    rows: list[TokenRow] = []
    budget = FRAME_TOKENS_MAX
    for request in session.dirty:
        log = request.log
        start, stop = log.sent, len(log.tokens)
        if stop - start > budget:
            until, end = start + budget, None
        else:
            until, end = stop, request.end
        tokens, logprobs = log.slice(start, until)
        rows.append(TokenRow(request.id, start, tokens, logprobs, end))
        budget -= until - start
        if budget <= 0:
            return rows, until < stop or len(rows) < len(session.dirty)
    return rows, False


def configure_output(socket: zmq.Socket[Any]) -> None:
    """Make an XPUB grant subscriptions by hand, report every one, and say EAGAIN instead of dropping."""
    socket.setsockopt(zmq.XPUB_MANUAL, 1)
    socket.setsockopt(zmq.XPUB_NODROP, 1)
