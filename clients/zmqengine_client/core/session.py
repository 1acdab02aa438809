"""The I/O-free core of a client: frames and the time in, frames and news out.

A shell owns the sockets and the clock. It calls `start_*`, `receive`, `disconnected` and `advance`, each with the time
in seconds, and after each round carries out `outbox.take_actions()` and wakes the listeners of
`outbox.take_changed()`. Nothing here blocks, and nothing here knows of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from zmqengine.errors import (
    AnswerTimeout,
    DeadlineExceeded,
    Fenced,
    NotAuthorized,
    WorkerLost,
    ZmqEngineError,
    from_code,
)
from zmqengine.protocol.codec import command_reply_decoder, control_reply_decoder, output_decoder
from zmqengine.protocol.messages import (
    Accepted,
    Bye,
    CommandReply,
    Description,
    Fatal,
    Granted,
    Hello,
    Rejected,
    Replay,
    TokenFrame,
    Watermark,
    Welcome,
)
from zmqengine_client.core.actions import Channel, Outbox
from zmqengine_client.core.calls import Call, CallTable
from zmqengine_client.core.connection import Connection, Phase
from zmqengine_client.core.control import Control, ControlCall
from zmqengine_client.core.events import ClientEvent
from zmqengine_client.core.liveness import Liveness
from zmqengine_client.core.request import Request, RequestPhase
from zmqengine_client.core.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Who the client is and how long it waits. See `Client` for the fields."""

    address: str
    name: str
    session_secret: bytes
    connect_timeout_s: float = 10.0
    ready_timeout_s: float | None = 600.0
    answer_timeout_s: float = 10.0
    worker_lost_timeout_s: float = 60.0
    resume: bool = True


class Session:
    """One front-end's conversation with one worker."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.outbox = Outbox()
        self._calls = CallTable(self.outbox, give_up_s=config.answer_timeout_s)
        self.connection = Connection(
            config.address, config.name, config.session_secret, self.outbox, self._calls
        )
        self._requests = RequestTable(
            self.connection,
            self._calls,
            self.outbox,
            resume=config.resume,
            room_timeout_s=config.worker_lost_timeout_s,
        )
        self.control = Control(
            config.address,
            self.outbox,
            connect_timeout_s=config.connect_timeout_s,
            answer_timeout_s=config.answer_timeout_s,
            ready_timeout_s=config.ready_timeout_s,
        )
        self._decode_control = control_reply_decoder().decode
        self._decode_reply = command_reply_decoder().decode
        self._decode_output = output_decoder().decode
        self._liveness = Liveness(self._calls, gone_s=config.worker_lost_timeout_s)
        self._bye_until = inf

    # --- from the caller -----------------------------------------------------------------------------------

    def start_request(self, request: Request, now: float) -> None:
        """Generate. News of the request is marked in the outbox."""
        self._requests.add(request, now)
        if self.connection.phase is Phase.FENCED:
            self._requests.fail(request, _fenced())
        elif self.connection.phase is Phase.CLOSED:
            self._requests.end_all()
        elif self.connection.phase is Phase.IDLE and not request.ended:
            self.connection.begin(now)
            self.control.describe_again(now, wait=False)

    def abort_request(self, request: Request, now: float) -> None:
        """Stop generating."""
        self._requests.abort(request, now)

    def start_control(self, call: ControlCall, now: float) -> None:
        """Ask ctl."""
        if self.closed:
            call.error = WorkerLost("the client was closed")
            self.outbox.mark(call)
        else:
            self.control.start(call, now)

    def close(self, now: float, wait_s: float = 0.5) -> None:
        """Say bye. `closed` becomes true when the worker has heard it, or after `wait_s`."""
        self._requests.end_all()
        if self.connection.phase is Phase.LIVE:
            self._requests.acks.flush(now)
            self._calls.send(Bye, now)
            self._bye_until = now + wait_s
        else:
            self.connection.close(now)
        self.control.close(WorkerLost("the client was closed"))

    @property
    def closed(self) -> bool:
        """Whether the sockets can go."""
        return self.connection.phase is Phase.CLOSED

    def abandon(self, error: ZmqEngineError, now: float) -> None:
        """End everything with `error` at once: the shell cannot go on."""
        self._requests.fail_all(error)
        self.control.close(error)
        self.connection.close(now)

    # --- from the sockets ----------------------------------------------------------------------------------

    def receive(self, channel: Channel, frames: Sequence[bytes], now: float) -> None:
        """One message that came in on `channel`. What cannot be decoded is counted and dropped."""
        try:
            if channel == "out":
                self._receive_output(frames, now)
            elif channel == "cmd":
                self._receive_reply(frames, now)
            else:
                self._receive_control(frames, now)
        except ZmqEngineError:
            self.outbox.counters.malformed += 1

    def connected(self, channel: Channel) -> None:
        """A connection is up, its handshake done."""
        if channel == "ctl":
            self.control.came_up()
            self.connection.worker_came()

    def disconnected(self, channel: Channel, now: float) -> None:
        """A connection broke."""
        if channel == "ctl":
            if self.control.broke(now):
                self._worker_went(now, "the connection to the worker broke")
        elif channel == "cmd":
            self._lose(now, "the connection to the worker broke")

    def handshake_failed(self, *, refused: bool) -> None:
        """The keys did not fit; `refused` when the worker said so."""
        self.control.handshake_failures += 1
        if refused:
            error = NotAuthorized("the worker refused this client's key: ask its operator to authorize it")
            self.control.close(error)
            self._requests.fail_all(error)

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let pass what is due by now."""
        for call in self._calls.advance(now):
            self._requests.gave_up(call, now)
            self._liveness.gave_up(call)
        if now >= self.connection.attempt_until():
            self._lose(now, f"no answer in phase {self.connection.phase.value}")
        self.control.advance(now)
        self._requests.advance(now)
        if self.connection.phase is Phase.LIVE:
            self._keep_up(now)
        else:
            self._expire(now)
        if now >= self._bye_until:
            self._bye_until = inf
            self.connection.close(now)

    def next_deadline(self) -> float:
        """When `advance` has to be called next, at the latest; infinity if only a message can bring news."""
        due = min(
            self._calls.next_deadline(),
            self.connection.attempt_until(),
            self.control.next_deadline(),
            self._requests.next_deadline(),
            self._bye_until,
        )
        if self.connection.phase is Phase.LIVE:
            due = min(due, self._liveness.next_deadline(has_requests=len(self._requests) > 0))
        return due

    # --- ctl -----------------------------------------------------------------------------------------------

    def _receive_control(self, frames: Sequence[bytes], now: float) -> None:
        description = self.control.receive(self._decode_control(frames), now)
        if description is None:
            return
        self._described(description, now)
        if self.connection.phase is not Phase.DESCRIBING:
            self.control.stop_describing()

    def _described(self, description: Description, now: float) -> None:
        phase = self.connection.phase
        if phase is Phase.DESCRIBING:
            self.connection.described(description, now)
        elif phase in (Phase.SUBSCRIBING, Phase.LIVE) and description.epoch != self.connection.epoch:
            self._lose(now, "another worker process answers on ctl")

    # --- cmd -----------------------------------------------------------------------------------------------

    def _receive_reply(self, frames: Sequence[bytes], now: float) -> None:
        reply: CommandReply = self._decode_reply(frames)
        call = self._calls.answered(reply.call)
        self._liveness.heard_reply(call, now)
        if call is None:
            return
        if isinstance(reply, Rejected):
            self._receive_rejected(reply, call, now)
        elif isinstance(reply, Welcome):
            if not self.connection.welcomed(reply, now):
                self._lose(now, "the worker restarted while the session was being opened")
        elif reply.epoch != self.connection.epoch:
            self._lose(now, "the worker answers with another epoch")
        elif isinstance(reply, Accepted):
            self._requests.receive_accepted(reply, call, now)
        elif isinstance(reply, Replay):
            self._requests.receive_replay(reply, call, now)
        elif call.kind is Bye:
            self._bye_until = inf
            self.connection.close(now)

    def _receive_rejected(self, rejected: Rejected, call: Call, now: float) -> None:
        if rejected.code == "fenced":
            self.connection.fence(now)
            self.control.stop_describing()
            self._requests.fail_all(_fenced())
        elif call.kind is Hello:
            self._hello_rejected(rejected, now)
        elif rejected.code in ("stale_epoch", "unknown_session", "not_subscribed"):
            self._lose(now, f"the worker says {rejected.code}")
        else:
            self._requests.receive_rejected(rejected, call, now)

    def _hello_rejected(self, rejected: Rejected, now: float) -> None:
        error = from_code(rejected.code, rejected.message, retry_after_ms=rejected.retry_after_ms)
        if rejected.code == "not_ready" or (self.connection.was_live and rejected.code == "overloaded"):
            # Described again at the loop's pace, and given up with the other ways of not being live.
            self._lose(now, rejected.message)
            return
        self._requests.fail_all(error)
        self._rest_if_idle(now)

    # --- out -----------------------------------------------------------------------------------------------

    def _receive_output(self, frames: Sequence[bytes], now: float) -> None:
        connection = self.connection
        if len(frames) != 3 or frames[0] != connection.topic:
            return
        message = self._decode_output(frames[1:])
        if message.epoch != connection.epoch:
            self._lose(now, "another worker process publishes")
            return
        self._liveness.heard_output(now)
        if connection.phase is not Phase.LIVE:
            if isinstance(message, Granted):
                self._granted(message, now)
        elif isinstance(message, TokenFrame):
            self._requests.receive_frame(message, now)
        elif isinstance(message, Watermark):
            self._requests.receive_watermark(message, now)
        elif isinstance(message, Fatal):
            self.outbox.events.append(ClientEvent("fatal", message.message))

    def _granted(self, granted: Granted, now: float) -> None:
        opening = self.connection.granted(granted, now)
        if opening is not None:
            self.control.stop_describing()
            self._liveness.begin(self.connection.lease_s)
            self._requests.go_live(opening, now)

    # --- losing and giving up ------------------------------------------------------------------------------

    def _lose(self, now: float, reason: str) -> None:
        if self._bye_until < inf:
            self._bye_until = inf
            self.connection.close(now)
            return
        if not self.connection.is_open:
            return
        was_live = self.connection.phase is Phase.LIVE
        self.connection.lose(now, reason)
        self._requests.go_down()
        self.control.describe_again(now, wait=not was_live)
        self._rest_if_idle(now)

    def _worker_went(self, now: float, reason: str) -> None:
        self.connection.worker_went(reason)
        if self.connection.phase in (Phase.HELLO, Phase.SUBSCRIBING):
            # cmd may not have been connected yet, and then says nothing.
            self._lose(now, reason)

    def _rest_if_idle(self, now: float) -> None:
        if not len(self._requests):
            self.connection.rest(now)
            self.control.stop_describing()

    def _expire(self, now: float) -> None:
        """Give up requests that have waited long enough for a session."""
        if not len(self._requests):
            self._rest_if_idle(now)
            return
        for request in self._requests.unfinished():
            error = self._opening_error(request, now)
            if error is None and now >= request.deadline_at:
                error = DeadlineExceeded("deadline_ms passed while there was no worker")
            if error is not None:
                self._requests.fail(request, error)

    def _opening_error(self, request: Request, now: float) -> ZmqEngineError | None:
        connection, config = self.connection, self.config
        if request.phase is not RequestPhase.WAITING:
            patience_s = config.worker_lost_timeout_s
            if not config.resume:
                patience_s = min(patience_s, config.connect_timeout_s)
            # A worker that is loading, and gets on with it, is not lost: a large model takes longer than any patience.
            gone_s = now - max(connection.lost_at, self.control.progressed_at)
            return self.control.gave_up_error(gone_s, now) if gone_s >= patience_s else None
        since = max(request.added_at, connection.opening_since or inf)
        if now - since >= config.answer_timeout_s:
            return AnswerTimeout(
                f"the worker at {config.address} is ready and opens no session; it may hang: see its log"
            )
        error = self.control.opening_error(request.added_at, now)
        gone_s = now - max(connection.lost_at, self.control.lost_at)
        may_come_back = gone_s < config.worker_lost_timeout_s
        return None if may_come_back and isinstance(error, WorkerLost) else error

    def _keep_up(self, now: float) -> None:
        verdict = self._liveness.advance(now, has_requests=len(self._requests) > 0)
        if verdict == "describe":
            self.control.describe_once()
        elif verdict == "gone":
            self._requests.fail_all(self.control.lost_error(now - self._liveness.heard_at))
            self._lose(now, "nothing was heard from the worker")
        elif verdict == "deaf":
            self._lose(now, "the worker answers commands but nothing is published")


def _fenced() -> Fenced:
    return Fenced("another connection has taken this session over; make a new client")
