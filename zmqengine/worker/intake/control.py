"""Answers to questions on ctl, on the control thread; work for the actor goes through the shared status."""

from __future__ import annotations

import os

import msgspec

from zmqengine import __version__
from zmqengine.errors import NotAuthorized, NotReady, ZmqEngineError
from zmqengine.protocol.addresses import Endpoints
from zmqengine.protocol.messages import (
    PROTOCOL_VERSION,
    ControlReply,
    ControlRequest,
    Describe,
    Description,
    Done,
    Drain,
    EndRequest,
    GetMetrics,
    GetStatus,
    GetTokenizer,
    Metrics,
    Ping,
    Rejected,
)
from zmqengine.worker.telemetry.metrics import prometheus, status
from zmqengine.worker.telemetry.shared_status import SharedStatus
from zmqengine.worker.wire.auth import Guard

LONG_REPLIES = (GetStatus, GetMetrics, GetTokenizer)
"""What is refused to a connection that has not read the long replies it asked for before."""


class ControlHandler:
    """Answers one request after the other. With a `guard` only an operator's key may drain the worker."""

    def __init__(self, board: SharedStatus, name: str, endpoints: Endpoints, guard: Guard | None) -> None:
        self._board = board
        self._name = name
        self._endpoints = endpoints
        self._guard = guard

    def handle(self, request: ControlRequest, user: str) -> ControlReply:
        """The answer to one request of `user`. Raises what it is refused with."""
        board = self._board
        match request:
            case Describe():
                return self._description(request.call)
            case GetStatus():
                return status(board, request.call, with_lists=self._is_operator(user))
            case GetMetrics():
                return Metrics(request.call, prometheus(board))
            case GetTokenizer():
                if board.tokenizer is None:
                    raise NotReady("the model is still loading")
                return msgspec.structs.replace(board.tokenizer, call=request.call)
            case Drain():
                if not self._is_operator(user):
                    raise NotAuthorized("draining needs an operator's key")
                # Asked twice is not asked to hurry: a client repeats what got no answer.
                if board.drain_requests == 0:
                    board.ask_to_drain()
            case EndRequest():
                if not self._is_operator(user):
                    raise NotAuthorized("ending another front-end's request needs an operator's key")
                board.ask_to_end(request.session, request.request)
            case Ping():
                pass
            case _:
                raise AssertionError(f"no handler for {type(request).__name__}")
        return Done(request.call, board.epoch)

    def long_bytes(self, request: ControlRequest) -> int:
        """How much longer than any other the answer will be: by the tokenizer."""
        tokenizer = self._board.tokenizer
        if not isinstance(request, GetTokenizer) or tokenizer is None:
            return 0
        return len(tokenizer.tokenizer_json)

    def rejection(self, call: int, error: ZmqEngineError) -> Rejected:
        """The refusal of a request."""
        return Rejected(
            call, self._board.epoch, error.code, error.message, retry_after_ms=error.retry_after_ms
        )

    def _is_operator(self, user: str) -> bool:
        """On this machine's own addresses everybody who can connect is one."""
        return self._guard is None or self._guard.is_operator(user)

    def _description(self, call: int) -> Description:
        board = self._board
        return Description(
            call=call,
            protocol=(PROTOCOL_VERSION, PROTOCOL_VERSION),
            version=__version__,
            name=self._name,
            pid=os.getpid(),
            epoch=board.epoch,
            state=board.told_state,
            progress=board.progress,
            cmd=self._endpoints.cmd,
            out=self._endpoints.out,
            model=board.model,
            limits=board.limits,
            message=board.message,
        )
