"""What each command of a front-end does. Every command gets one reply; none of them touches the engine's batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count

from zmqengine.errors import (
    Aborted,
    BadRequest,
    Conflict,
    ContextExceeded,
    Draining,
    NeverFits,
    NotSubscribed,
    Overloaded,
    StaleEpoch,
    UnknownRequest,
    ZmqEngineError,
)
from zmqengine.protocol import messages
from zmqengine.protocol.messages import (
    Abort,
    Accepted,
    Ack,
    Bye,
    Command,
    CommandReply,
    Done,
    Hello,
    Insert,
    Limits,
    Ping,
    Rejected,
    Replay,
    RequestState,
    Resume,
    TokenRow,
    Welcome,
)
from zmqengine.worker.counters import Counters
from zmqengine.worker.endings import Endings
from zmqengine.worker.request import LiveRequest, digest
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import Session, SessionTable

log = logging.getLogger("zmqengine.worker")

REPLAY_TOKENS_MAX = 16_384
RETRY_FLOOR_MS = 100


class CommandHandler:
    """Answers commands."""

    def __init__(
        self,
        *,
        epoch: bytes,
        limits: Limits,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        lease_ms: int,
        token_log_bytes_max: int,
        sessions: SessionTable,
        scheduler: Scheduler,
        counters: Counters,
        project_bytes: Callable[[int], int],
        endings: Endings,
    ) -> None:
        self._epoch = epoch
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lease_ms = lease_ms
        self._log_bytes_max = token_log_bytes_max
        self._sessions = sessions
        self._scheduler = scheduler
        self._counters = counters
        self._project_bytes = project_bytes
        self._endings = endings
        self._arrivals = count()
        self.draining = False

    def handle(self, command: Command, route: bytes, user: str, now_s: float) -> CommandReply:
        """Carry out one command. Errors become a `Rejected`; nothing is raised."""
        try:
            if isinstance(command, Hello):
                return self._hello(command, route, user, now_s)
            if isinstance(command, Insert) and command.epoch != self._epoch:
                raise StaleEpoch("the worker has restarted; say hello and insert again with `emitted`")
            session = self._sessions.of_route(route, user)
            self._sessions.renew(session, now_s)
            return self._handle_in_session(command, session, now_s)
        except ZmqEngineError as error:
            return self.rejection(error, command.call, getattr(command, "request", None))

    def rejection(self, error: ZmqEngineError, call: int, request: str | None) -> Rejected:
        """The refusal of a command, counted and logged."""
        self._counters.rejected += 1
        log.info("rejected", extra={"request": request, "code": error.code, "reason": error.message})
        return Rejected(call, self._epoch, error.code, error.message, request, error.retry_after_ms)

    def _handle_in_session(self, command: Command, session: Session, now_s: float) -> CommandReply:
        match command:
            case Insert():
                return self._insert(command, session, now_s)
            case Abort():
                self._abort(command, session)
            case Resume():
                return self._resume(command, session)
            case Ack():
                self._ack(command, session)
            case Bye():
                self._endings.end_session(session, "abort")
            case Ping():
                pass
            case _:
                raise AssertionError(f"no handler for {type(command).__name__}")
        return Done(command.call, self._epoch)

    def _hello(self, command: Hello, route: bytes, user: str, now_s: float) -> Welcome:
        session = self._sessions.hello(command, route, user, now_s)
        log.info("session", extra={"session": session.id, "client": session.client})
        return Welcome(
            call=command.call,
            protocol=messages.PROTOCOL_VERSION,
            epoch=self._epoch,
            session=session.id,
            topic=session.topic.decode(),
            limits=self._limits,
            lease_ms=self._lease_ms,
            requests=session.watermarks(),
        )

    def _insert(self, insert: Insert, session: Session, now_s: float) -> Accepted:
        known = session.requests.get(insert.request)
        contents = digest(insert)
        if known is not None:
            if known.digest != contents:
                raise Conflict(f"request {insert.request!r} is in use with other contents; choose another id")
            return self._accepted(insert, known)
        if insert.request in session.early_aborts:
            raise Aborted("the request was aborted before it was inserted")
        if not session.is_granted:
            raise NotSubscribed("subscribe to the session's topic and wait for `granted` before inserting")
        if self.draining:
            raise Draining("the worker is draining: it takes no new requests")
        self._check_against_model(insert)
        self._check_room(session)
        request = LiveRequest(
            session,
            insert,
            digest=contents,
            arrival=next(self._arrivals),
            arrival_pass=self._counters.passes,
            eos_token_ids=self._eos_token_ids,
            projected_bytes=self._projected_bytes(insert),
            now_s=now_s,
        )
        session.requests[request.id] = request
        session.log_bytes += request.log.nbytes
        self._scheduler.enqueue(request)
        self._counters.accepted += 1
        return self._accepted(insert, request)

    def _accepted(self, insert: Insert, request: LiveRequest) -> Accepted:
        state: RequestState = request.phase
        return Accepted(insert.call, self._epoch, request.id, len(request.log), request.seed, state)

    def _check_against_model(self, insert: Insert) -> None:
        for name in ("prompt", "emitted", "stop_token_ids"):
            ids: list[int] = getattr(insert, name)
            if ids and max(ids) >= self._vocab_size:
                raise BadRequest(f"{name} has id {max(ids)}, the vocabulary has {self._vocab_size} tokens")
        bias = insert.sampling.logit_bias
        if bias and max(bias) >= self._vocab_size:
            raise BadRequest(f"logit_bias has id {max(bias)}, the vocabulary has {self._vocab_size} tokens")
        context = self._limits.context_tokens_max
        if len(insert.prompt) + insert.max_tokens > context:
            raise ContextExceeded(
                f"prompt of {len(insert.prompt)} tokens + max_tokens {insert.max_tokens} "
                f"is over the context of {context} tokens"
            )
        if len(insert.emitted) >= insert.max_tokens:
            raise BadRequest(
                f"emitted has {len(insert.emitted)} tokens, max_tokens is {insert.max_tokens}: nothing is left to do"
            )

    def _check_room(self, session: Session) -> None:
        session.forget_oldest_delivered(
            bytes_max=self._log_bytes_max, requests_max=self._limits.requests_per_session_max
        )
        if len(session.requests) >= self._limits.requests_per_session_max:
            raise Overloaded(
                f"the session holds {len(session.requests)} requests; acknowledge those that have ended",
                retry_after_ms=self._retry_after_ms(),
            )
        if session.log_bytes > self._log_bytes_max:
            raise Overloaded(
                f"the session holds {session.log_bytes} bytes of output; acknowledge those that have ended",
                retry_after_ms=self._retry_after_ms(),
            )
        if self._scheduler.queued >= self._limits.queued_max:
            raise Overloaded(
                f"{self._scheduler.queued} requests wait already", retry_after_ms=self._retry_after_ms()
            )

    def _projected_bytes(self, insert: Insert) -> int:
        projected = self._project_bytes(len(insert.prompt) + insert.max_tokens)
        if projected > self._scheduler.kv_bytes_max:
            raise NeverFits(
                f"prompt of {len(insert.prompt)} + max_tokens {insert.max_tokens} needs {projected} bytes of KV "
                f"cache, the worker has {self._scheduler.kv_bytes_max}; lower max_tokens or raise --memory-limit"
            )
        return projected

    def _retry_after_ms(self) -> int:
        # Half a second for each batch of waiting requests: crude, bounded, and it grows with the line.
        return min(30_000, RETRY_FLOOR_MS + 15 * self._scheduler.queued)

    def _abort(self, command: Abort, session: Session) -> None:
        request = session.requests.get(command.request)
        if request is None:
            session.remember_early_abort(command.request)
        elif request.end is None:
            self._endings.end(request, "abort", "")

    def _resume(self, command: Resume, session: Session) -> Replay:
        if command.epoch != self._epoch:
            raise StaleEpoch("the worker has restarted; say hello and insert again with `emitted`")
        request = session.requests.get(command.request)
        if request is None:
            raise UnknownRequest(f"the worker holds no request {command.request!r}")
        start = min(command.from_index, len(request.log))
        stop = min(len(request.log), start + REPLAY_TOKENS_MAX)
        tokens, logprobs = request.log.slice(start, stop)
        more = stop < len(request.log)
        end = None if more else request.end
        self._counters.resumes += 1
        return Replay(
            command.call, self._epoch, TokenRow(request.id, start, tokens, logprobs, end), more=more
        )

    def _ack(self, command: Ack, session: Session) -> None:
        for request_id in command.requests:
            request = session.requests.get(request_id)
            if request is not None and request.end is not None:
                session.forget(request)
