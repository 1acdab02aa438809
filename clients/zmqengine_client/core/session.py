"""The I/O-free core of a client: frames and the time in, actions and changes out.

A half (asyncio or threaded) owns the sockets and the clock. It calls `start_*`, `receive`, `disconnected` and
`advance`, each with the time in seconds, and after each round carries out `outbox.take_actions()` and calls
`outbox.tell()`. Nothing here blocks or knows of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.errors import ModelLoadError, NotAuthorized, WorkerLost, ZmqEngineError
from zmqengine.protocol.codec import control_reply_decoder, output_decoder
from zmqengine.protocol.messages import Fatal, Granted, TokenFrame, Watermark
from zmqengine_client.core.connection import SessionConfig
from zmqengine_client.core.control import Control, ControlCall
from zmqengine_client.core.dialogue import Dialogue, fenced
from zmqengine_client.core.model_gate import ModelGate
from zmqengine_client.core.outbox import Channel, ClientEvent, MakePixels, OpenControl, Outbox
from zmqengine_client.core.phases import Phase
from zmqengine_client.core.presence import Patience, Presence
from zmqengine_client.core.request import Request
from zmqengine_client.images.image_body import ImageBody


class ClientSession:
    """The session of one front-end with one worker."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.outbox = Outbox()
        self._presence = Presence()
        patience = Patience(config, self._presence)
        self._control = Control(self.outbox, self._presence, patience)
        self._dialogue = Dialogue(config, self.outbox, self._control, patience)
        self._requests = self._dialogue.requests
        self._live = self._requests.live
        self.connection = self._dialogue.connection
        self._gate = None if config.model is None else ModelGate(config.model, config, self.outbox)
        self._decode_control = control_reply_decoder().decode
        self._decode_output = output_decoder().decode

    # --- from the caller -----------------------------------------------------------------------------------

    def start_request(self, request: Request, now: float) -> None:
        """Start to generate. Changes of the request are marked in the outbox."""
        if self._gate is not None and not (self._gate.is_open or self.closed):
            if not request.ended:
                self._gate.add(request, now)
            return
        self._live.add(request, now)
        if request.ended:
            return
        self._try_again()
        if self.connection.phase is Phase.LIVE:
            self._requests.inserting.insert(request, now)
        elif self.connection.phase is Phase.FENCED:
            self._live.end(request, error=fenced())
        elif self.closed:
            self._live.end(request, finish="abort")
        else:
            self._dialogue.begin(now)

    def abort_request(self, request: Request, now: float) -> None:
        """Stop generating."""
        if self._gate is not None and request in self._gate.waiting:
            self._gate.waiting.remove(request)
            self._live.end(request, finish="abort")
            return
        self._requests.abort(request, now)

    def pixels_made(
        self, made: MakePixels, bodies: Sequence[ImageBody], error: ZmqEngineError | None, now: float
    ) -> None:
        """The pixels of a `MakePixels`, or the error with which they could not be made."""
        request = made.key
        assert isinstance(request, Request)
        if request.ended:
            return
        if error is not None:
            self._live.end(request, error=error)
            return
        for image, body in zip(made.images, bodies, strict=True):
            image.body = body
        self._requests.inserting.pixels_made(request, now)

    def start_control(self, call: ControlCall, now: float) -> None:
        """Send a call on ctl."""
        if self.closed:
            call.error = WorkerLost("the client was closed")
            self.outbox.mark(call)
        elif self._gate is not None and not self._gate.is_open:
            self._gate.add(call, now)
        else:
            self._try_again()
            self._control.start(call, now)

    def close(self, now: float, wait_s: float = 0.5) -> None:
        """Say bye. `closed` becomes true on the worker's reply, or after `wait_s`."""
        self._end_waiting(None)
        self._live.abort_all()
        self._dialogue.end(now, wait_s)
        self._control.close(WorkerLost("the client was closed"))

    @property
    def closed(self) -> bool:
        """Whether the sockets can be closed."""
        return self.connection.phase is Phase.CLOSED

    def fail(self, error: ZmqEngineError) -> None:
        """End every request and call with `error` at once: no worker will answer them."""
        self._end_waiting(error)
        self._live.fail_all(error)
        self._control.close(error)

    def abandon(self, error: ZmqEngineError, now: float) -> None:
        """Fail the session for good: the half that drives it has failed."""
        self.fail(error)
        self.connection.close(now)

    # --- from the sockets ----------------------------------------------------------------------------------

    def receive(self, channel: Channel, frames: Sequence[bytes], now: float) -> None:
        """Process one message of `channel`. A malformed message is counted and dropped."""
        try:
            if channel == "out":
                self._receive_output(frames, now)
            elif channel == "cmd":
                self._dialogue.receive_reply(frames, now)
            elif channel == "launcher":
                self._receive_launcher(frames, now)
            else:
                self._receive_control(frames, now)
        except ZmqEngineError:
            self.outbox.counters.malformed += 1

    def connected(self, channel: Channel) -> None:
        """A connection is established, its handshake done."""
        if channel == "ctl":
            self._presence.came_up()
            self.connection.worker_came()

    def disconnected(self, channel: Channel, now: float) -> None:
        """A connection broke."""
        reason = "the connection to the worker broke"
        if channel == "cmd":
            self._dialogue.lose(now, reason)
        elif channel == "ctl" and self._presence.broke(now):
            self._dialogue.worker_went(now, reason)

    def handshake_failed(self, *, refused: bool) -> None:
        """The CURVE handshake failed; `refused` if the worker rejected this client's key."""
        self._presence.handshake_failures += 1
        if refused:
            self._presence.refused = True
            error = NotAuthorized("the worker refused this client's key: ask its operator to authorize it")
            self._control.close(error)
            self._live.fail_all(error)

    def _try_again(self) -> None:
        """Reconnect ctl after a rejected key, which may have been authorized since."""
        if self._presence.refused:
            self._presence.refused = False
            self.outbox.actions.append(OpenControl())

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Do everything that is due by now."""
        if self._gate is not None:
            error = self._gate.advance(now, is_busy=bool(len(self._live)) or self._control.is_busy)
            if error is not None:
                self._end_waiting(error)
        self._control.advance(now)
        self._dialogue.advance(now)

    def next_deadline(self) -> float:
        """The latest time for the next `advance`; infinity if there is nothing to do before a message."""
        due = min(self._control.next_deadline(), self._dialogue.next_deadline())
        return due if self._gate is None else min(due, self._gate.next_deadline())

    def _receive_launcher(self, frames: Sequence[bytes], now: float) -> None:
        assert self._gate is not None
        error = self._gate.receive(frames, now)
        if isinstance(error, ModelLoadError):
            # Running requests wait for the next worker, and none comes.
            self.fail(error)
        elif error is not None:
            self._end_waiting(error)
        elif self._gate.is_open:
            for item in self._gate.take():
                if isinstance(item, ControlCall):
                    self.start_control(item, now)
                else:
                    self.start_request(item, now)

    def _end_waiting(self, error: ZmqEngineError | None) -> None:
        """End requests and calls that wait for their model: with an error, or because the client is closed."""
        for item in [] if self._gate is None else self._gate.take():
            if isinstance(item, ControlCall):
                item.error = error or WorkerLost("the client was closed")
                self.outbox.mark(item)
            elif error is None:
                self._live.end(item, finish="abort")
            else:
                self._live.end(item, error=type(error)(error.message, retry_after_ms=error.retry_after_ms))

    def _receive_control(self, frames: Sequence[bytes], now: float) -> None:
        description = self._control.receive(self._decode_control(frames), now)
        if description is not None:
            self._dialogue.described(description, now)

    def _receive_output(self, frames: Sequence[bytes], now: float) -> None:
        connection = self.connection
        if len(frames) != 3 or frames[0] != connection.topic:
            return
        message = self._decode_output(frames[1:])
        if message.epoch != connection.epoch:
            self._dialogue.lose(now, "another worker process publishes")
            return
        self._dialogue.liveness.heard_output(now)
        if connection.phase is not Phase.LIVE:
            if isinstance(message, Granted):
                self._dialogue.granted(message, now)
        elif isinstance(message, TokenFrame):
            self._live.receive(message, now)
        elif isinstance(message, Watermark):
            self._live.receive_watermark(message, now)
        elif isinstance(message, Fatal):
            self.outbox.events.append(ClientEvent("fatal", message.message))
