"""The conversation on cmd: dispatches replies, and reopens a lost session."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from zmqengine.errors import DeadlineExceeded, Fenced, from_code
from zmqengine.protocol.codec import command_reply_decoder
from zmqengine.protocol.messages import (
    Accepted,
    Bye,
    CommandReply,
    Description,
    Granted,
    Hello,
    Rejected,
    Replay,
    Welcome,
)
from zmqengine_client.core.calls import CallTable, CommandCall
from zmqengine_client.core.connection import Connection, SessionConfig
from zmqengine_client.core.control import Control
from zmqengine_client.core.liveness import Liveness
from zmqengine_client.core.outbox import Outbox
from zmqengine_client.core.phases import Phase
from zmqengine_client.core.presence import Patience
from zmqengine_client.core.request_table import RequestTable


class Dialogue:
    """The connection with its calls and its requests. When it is lost, it makes `control` describe."""

    def __init__(self, config: SessionConfig, outbox: Outbox, control: Control, patience: Patience) -> None:
        self._control = control
        self._patience = patience
        self._calls = CallTable(outbox, give_up_s=config.answer_timeout_s)
        self.connection = Connection(config, self._calls)
        self.requests = RequestTable(config, self.connection, self._calls)
        self.liveness = Liveness(self._calls, gone_s=config.worker_lost_timeout_s)
        self._decode_reply = command_reply_decoder().decode
        self._bye_until = inf

    def begin(self, now: float) -> None:
        """A request needs a session."""
        if self.connection.phase is Phase.IDLE:
            self.connection.begin(now)
            self._control.describing.begin_anew(now, wait=False)

    def end(self, now: float, wait_s: float) -> None:
        """Say bye; close the connection on its reply or after `wait_s`."""
        if self.connection.phase is Phase.LIVE:
            self.requests.live.acks.flush(now)
            self._calls.send(Bye, now)
            self._bye_until = now + wait_s
        else:
            self.connection.close(now)

    def described(self, description: Description, now: float) -> None:
        """ctl received a description of the worker."""
        phase = self.connection.phase
        if phase is Phase.DESCRIBING:
            self.connection.described(description, now)
        elif phase in (Phase.SUBSCRIBING, Phase.LIVE) and description.epoch != self.connection.epoch:
            self.lose(now, "another worker process answers on ctl")
        if self.connection.phase is not Phase.DESCRIBING:
            self._control.stop_describing()

    def granted(self, granted: Granted, now: float) -> None:
        """The subscription is active."""
        opening = self.connection.granted(granted, now)
        if opening is not None:
            self._control.stop_describing()
            self.liveness.begin(self.connection.lease_s)
            self.requests.go_live(opening, now)

    def worker_went(self, now: float, reason: str) -> None:
        """ctl lost its connection to the worker."""
        self.connection.worker_went(reason)
        if self.connection.phase in (Phase.HELLO, Phase.SUBSCRIBING):
            # cmd may not be connected yet, and then reports no loss.
            self.lose(now, reason)

    def lose(self, now: float, reason: str) -> None:
        """The session is unusable: open another one if a request needs it."""
        if self._bye_until < inf:
            self._close(now)
            return
        if not self.connection.is_open:
            return
        was_live = self.connection.phase is Phase.LIVE
        self.connection.lose(now, reason)
        self.requests.go_down()
        self._control.describing.begin_anew(now, wait=not was_live)
        self._rest_if_idle(now)

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Do everything that is due by now."""
        for call in self._calls.advance(now):
            self.requests.gave_up(call, now)
            self.liveness.gave_up(call)
        if now >= self.connection.attempt_until():
            self.lose(now, f"no answer in phase {self.connection.phase.value}")
        self.requests.advance(now)
        if self.connection.phase is Phase.LIVE:
            self._keep_up(now)
        else:
            self._expire(now)
        if now >= self._bye_until:
            self._close(now)

    def next_deadline(self) -> float:
        """The latest time for the next `advance`; infinity if there is nothing to do before a message."""
        due = min(
            self._calls.next_deadline(),
            self.connection.attempt_until(),
            self.requests.next_deadline(),
            self._bye_until,
        )
        if self.connection.phase is Phase.LIVE:
            due = min(due, self.liveness.next_deadline(has_requests=len(self.requests.live) > 0))
        return due

    def _keep_up(self, now: float) -> None:
        verdict = self.liveness.advance(now, has_requests=len(self.requests.live) > 0)
        if verdict == "describe":
            self._control.describing.once()
        elif verdict == "gone":
            self.requests.live.fail_all(self._patience.lost_error(now - self.liveness.heard_at))
            self.lose(now, "the worker has gone silent")
        elif verdict == "deaf":
            self.lose(now, "the worker answers commands but nothing is published")

    def _expire(self, now: float) -> None:
        """End requests that have waited too long for a session."""
        self._rest_if_idle(now)
        for request in self.requests.live:
            error = self._patience.request_error(request, self.connection, now)
            if error is None and now >= request.deadline_at:
                error = DeadlineExceeded("deadline_ms passed while there was no session with a worker")
            if error is not None:
                self.requests.live.end(request, error=error)

    def _rest_if_idle(self, now: float) -> None:
        if not len(self.requests.live):
            self.connection.rest(now)
            self._control.stop_describing()

    def _close(self, now: float) -> None:
        self._bye_until = inf
        self.connection.close(now)

    # --- cmd -----------------------------------------------------------------------------------------------

    def receive_reply(self, frames: Sequence[bytes], now: float) -> None:
        """A message from cmd."""
        reply: CommandReply = self._decode_reply(frames)
        call = self._calls.answered(reply.call)
        self.liveness.heard_reply(call, now)
        if call is None:
            return
        if isinstance(reply, Rejected):
            self._rejected(reply, call, now)
        elif isinstance(reply, Welcome):
            if not self.connection.welcomed(reply, now):
                self.lose(now, "the worker restarted while the session was being opened")
        elif reply.epoch != self.connection.epoch:
            self.lose(now, "the worker answers with another epoch")
        elif isinstance(reply, Accepted):
            self.requests.receive_accepted(reply, call, now)
        elif isinstance(reply, Replay):
            self.requests.receive_replay(reply, call, now)
        elif call.kind is Bye:
            self._close(now)

    def _rejected(self, rejected: Rejected, call: CommandCall, now: float) -> None:
        if rejected.code == "fenced":
            self.connection.fence(now)
            self._control.stop_describing()
            self.requests.live.fail_all(fenced())
        elif call.kind is Hello:
            self._hello_rejected(rejected, now)
        elif rejected.code in ("stale_epoch", "unknown_session", "not_subscribed"):
            self.lose(now, f"the worker says {rejected.code}")
        else:
            self.requests.receive_rejected(rejected, call, now)

    def _hello_rejected(self, rejected: Rejected, now: float) -> None:
        if rejected.code == "not_ready" or (self.connection.was_live and rejected.code == "overloaded"):
            # Described again at the loop's pace; time-outs are those of any connection that is not live.
            self.lose(now, rejected.message)
            return
        error = from_code(rejected.code, rejected.message, retry_after_ms=rejected.retry_after_ms)
        self.requests.live.fail_all(error)
        self._rest_if_idle(now)


def fenced() -> Fenced:
    """The error of every request and call of a fenced client."""
    return Fenced("another connection has taken this session over; make a new client")
