"""The control thread: answers on ctl whatever the actor is doing. It never touches MLX."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Protocol

import msgspec
import zmq

from zmqengine import __version__
from zmqengine.errors import NotAuthorized, NotReady, ZmqEngineError
from zmqengine.protocol.addresses import Endpoints
from zmqengine.protocol.codec import control_decoder, encode, read_addressee
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
from zmqengine.worker.auth import Guard
from zmqengine.worker.board import Board
from zmqengine.worker.inbox import user_of
from zmqengine.worker.metrics import prometheus, status

log = logging.getLogger("zmqengine.control")


class Watched(Protocol):
    """Something beside ctl that the control thread serves: the supervisor's pipe, the key check."""

    def fileno(self) -> int:
        """What to poll for reading."""
        ...

    def check(self) -> object:
        """Called when it is readable."""
        ...


class ControlThread:
    """Serves ctl until stopped. The socket is handed over for good: it is only used on this thread.

    With a `guard` it also serves the key check, and only an operator's key may drain the worker.
    """

    def __init__(
        self,
        ctl: zmq.Socket[bytes],
        board: Board,
        *,
        name: str,
        endpoints: Endpoints,
        guard: Guard | None = None,
    ) -> None:
        self._ctl = ctl
        self._board = board
        self._name = name
        self._endpoints = endpoints
        self._guard = guard
        self._decoder = control_decoder()
        self._stop_reader, self._stop_writer = os.pipe()
        self._watched: list[Watched] = [] if guard is None else [guard]
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def watch(self, watched: Watched) -> None:
        """Serve something else as well; before `start`."""
        self._watched.append(watched)

    def start(self) -> None:
        """From now on ctl answers."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and wait for the thread. Idempotent."""
        if self._stop_writer >= 0:
            os.close(self._stop_writer)
            self._stop_writer = -1
            if self._thread.ident is not None:
                self._thread.join()
            os.close(self._stop_reader)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._ctl, zmq.POLLIN)
        poller.register(self._stop_reader, zmq.POLLIN)
        for watched in self._watched:
            poller.register(watched.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_reader in ready:
                return
            for watched in list(self._watched):
                if watched.fileno() in ready and watched.check():
                    poller.unregister(watched.fileno())
                    self._watched.remove(watched)
            if self._ctl in ready:
                self._answer()

    def _answer(self) -> None:
        frames: list[Any] = self._ctl.recv_multipart(copy=False)
        route, parts = frames[0].bytes, [frame.bytes for frame in frames[1:]]
        reply = self._reply(parts, user_of(frames[-1]) if self._guard is not None else "")
        try:
            self._ctl.send_multipart([route, *encode(reply)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            log.debug("control reply dropped", extra={"reason": str(error)})

    def _reply(self, parts: list[bytes], user: str) -> ControlReply:
        call = 0
        try:
            call = read_addressee(parts[1]).call if len(parts) == 2 else 0
            request: ControlRequest = self._decoder.decode(parts)
            return self._handle(request, user)
        except ZmqEngineError as error:
            return Rejected(call, self._board.epoch, error.code, error.message)

    def _handle(self, request: ControlRequest, user: str) -> ControlReply:
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
            state=board.state,
            progress=board.progress,
            cmd=self._endpoints.cmd,
            out=self._endpoints.out,
            model=board.model,
            limits=board.limits,
            message=board.message,
        )
