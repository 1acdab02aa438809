"""Handlers of requests on ctl, on the control thread; work for the actor goes through the shared status."""

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
    LoadAdapter,
    Metrics,
    Ping,
    Rejected,
    UnloadAdapter,
)
from zmqengine.worker.telemetry.metrics import prometheus, status
from zmqengine.worker.telemetry.shared_status import AdapterCall, SharedStatus
from zmqengine.worker.wire.auth import Guard

LONG_REPLIES = (GetStatus, GetMetrics, GetTokenizer)
"""Requests with long replies, refused to a connection with unread ones."""


class ControlHandler:
    """Answers requests on ctl. With a `guard`, only an operator's key may drain the worker."""

    def __init__(
        self, shared_status: SharedStatus, name: str, endpoints: Endpoints, guard: Guard | None
    ) -> None:
        self._shared_status = shared_status
        self._name = name
        self._endpoints = endpoints
        self._guard = guard

    def handle(self, request: ControlRequest, user: str, route: bytes = b"") -> ControlReply | None:
        """The answer to one request of `user`, or None where the actor gives it, for the connection `route`. Raises the
        error of a refusal."""
        shared_status = self._shared_status
        match request:
            case Describe():
                return self._description(request.call)
            case GetStatus():
                return status(shared_status, request.call, with_lists=self._is_operator(user))
            case GetMetrics():
                return Metrics(request.call, prometheus(shared_status))
            case GetTokenizer():
                if shared_status.tokenizer is None:
                    raise NotReady("the model is still loading")
                return msgspec.structs.replace(shared_status.tokenizer, call=request.call)
            case Drain():
                if not self._is_operator(user):
                    raise NotAuthorized("draining needs an operator's key")
                # A second drain command does not end the worker at once: clients repeat unanswered commands.
                if shared_status.drain_requests == 0:
                    shared_status.ask_to_drain()
            case EndRequest():
                if not self._is_operator(user):
                    raise NotAuthorized("ending another front-end's request needs an operator's key")
                shared_status.ask_to_end(request.session, request.request)
            case LoadAdapter() | UnloadAdapter():
                if not self._is_operator(user):
                    raise NotAuthorized("loading and unloading adapters needs an operator's key")
                if shared_status.state in ("loading", "warming"):
                    raise NotReady("the model is still loading")
                directory = request.directory if isinstance(request, LoadAdapter) else None
                shared_status.ask_actor(AdapterCall(route, request.call, request.name, directory))
                return None
            case Ping():
                pass
            case _:
                raise AssertionError(f"no handler for {type(request).__name__}")
        return Done(request.call, shared_status.epoch)

    def long_bytes(self, request: ControlRequest) -> int:
        """Bytes of the tokenizer in the answer, by which it is longer than others."""
        tokenizer = self._shared_status.tokenizer
        if not isinstance(request, GetTokenizer) or tokenizer is None:
            return 0
        return len(tokenizer.tokenizer_json)

    def rejection(self, call: int, error: ZmqEngineError) -> Rejected:
        """The refusal of a request."""
        return Rejected(
            call, self._shared_status.epoch, error.code, error.message, retry_after_ms=error.retry_after_ms
        )

    def _is_operator(self, user: str) -> bool:
        """Whether this is an operator: on this machine's own addresses, every peer is one."""
        return self._guard is None or self._guard.is_operator(user)

    def _description(self, call: int) -> Description:
        shared_status = self._shared_status
        return Description(
            call=call,
            protocol=(PROTOCOL_VERSION, PROTOCOL_VERSION),
            version=__version__,
            name=self._name,
            pid=os.getpid(),
            epoch=shared_status.epoch,
            state=shared_status.told_state,
            progress=shared_status.progress,
            cmd=self._endpoints.cmd,
            out=self._endpoints.out,
            model=shared_status.model,
            limits=shared_status.limits,
            message=shared_status.message,
        )
