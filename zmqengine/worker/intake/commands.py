"""Handlers of commands. Every command gets one reply; none touches the engine's batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zmqengine.errors import (
    Aborted,
    BadRequest,
    Conflict,
    ImageWanted,
    NotAuthorized,
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
    Embed,
    Hello,
    Image,
    Insert,
    Ping,
    Rejected,
    Replay,
    RequestState,
    Resume,
    Welcome,
)
from zmqengine.request_rules import (
    Vectors,
    check_forced,
    check_keep,
    check_min_tokens,
    check_prediction,
    check_token_ids,
    check_vectors,
    marker_ids,
    no_generation,
    no_vision,
)
from zmqengine.vision_card import check_images
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.intake.sessions import SessionTable
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.requests.images import SettledImage
from zmqengine.worker.requests.live_request import LiveRequest, Phase
from zmqengine.worker.wire.session import Session

log = logging.getLogger("zmqengine.worker")

REPLAY_BYTES_MAX = 256 * 1024
"""Maximum tokens of one reply to a resume; the front-end requests the rest."""
_STATES: dict[Phase, RequestState] = {
    "preparing": "queued",
    "queued": "queued",
    "running": "running",
    "parked": "running",
    "ended": "ended",
}


class CommandHandler:
    """Answers commands of sessions."""

    def __init__(self, context: WorkerContext, sessions: SessionTable, lifecycle: Lifecycle) -> None:
        self._context = context
        self._epoch = context.epoch
        self._limits = context.limits
        self._counters = context.counters
        self._sessions = sessions
        self._lifecycle = lifecycle

    def handle(self, command: Command, route: bytes, user: str, now_s: float, peer: str = "") -> CommandReply:
        """Carry out one command of `user` and, as far as it is known, `peer`. Errors become a `Rejected`.

        Raises `ImageArrives` for a command that sends or names an image whose hash is not known yet: to be carried out
        again.
        """
        try:
            if isinstance(command, Hello):
                return self._hello(command, route, user, now_s, peer)
            if isinstance(command, Insert | Image | Embed) and command.epoch != self._epoch:
                raise StaleEpoch("the worker has restarted; say hello and insert again with `emitted`")
            session = self._sessions.of_route(route, user)
            self._sessions.renew(session, now_s)
            return self._handle_in_session(command, session, now_s)
        except ZmqEngineError as error:
            return self.rejection(error, command.call, getattr(command, "request", None))

    def settled_images(self) -> Sequence[SettledImage]:
        """Images whose hash has become known since the last call."""
        return self._lifecycle.settled_images()

    def rejection(self, error: ZmqEngineError, call: int, request: str | None) -> Rejected:
        """The refusal of a command, counted and logged."""
        self._counters.rejected += 1
        log.info("rejected", extra={"request": request, "code": error.code, "reason": error.message})
        wanted = error.wanted if isinstance(error, ImageWanted) else []
        return Rejected(call, self._epoch, error.code, error.message, request, error.retry_after_ms, wanted)

    def _handle_in_session(self, command: Command, session: Session, now_s: float) -> CommandReply:
        match command:
            case Insert() | Embed():
                return self._insert(command, session, now_s)
            case Image():
                self._lifecycle.keep_image(command, session)
            case Abort():
                self._abort(command, session)
            case Resume():
                return self._resume(command, session)
            case Ack():
                self._ack(command, session)
            case Bye():
                self._bye(session)
            case Ping():
                pass
            case _:
                raise AssertionError(f"no handler for {type(command).__name__}")
        return Done(command.call, self._epoch)

    def _hello(self, command: Hello, route: bytes, user: str, now_s: float, peer: str) -> Welcome:
        if user and not self._context.is_authorized(user):
            # The connection was opened before the key was removed.
            raise NotAuthorized("this key was removed")
        session = self._sessions.hello(command, route, user, now_s, peer)
        log.info("session", extra={"session": session.id, "client": session.client})
        return Welcome(
            call=command.call,
            protocol=messages.PROTOCOL_VERSION,
            epoch=self._epoch,
            session=session.id,
            topic=session.topic.decode(),
            limits=self._limits,
            lease_ms=self._context.config.lease_ms,
            requests=session.watermarks(),
            grace_ms=self._context.config.grace_ms,
        )

    def _insert(self, insert: Insert | Embed, session: Session, now_s: float) -> Accepted:
        known = session.requests.get(insert.request)
        if known is not None:
            if not known.is_of(insert):
                raise Conflict(f"request {insert.request!r} is in use with other contents; choose another id")
            return self._accepted(insert, known)
        if insert.request in session.early_aborts:
            raise Aborted("the request was aborted before it was inserted")
        if not session.is_granted:
            raise NotSubscribed("subscribe to the session's topic and wait for `granted` before inserting")
        # Before every check that depends on the load, which an unauthorized peer must not learn.
        self._lifecycle.check_authorized(insert, session)
        self._check_ids(insert)
        self._check_held(insert, session)
        return self._accepted(insert, self._lifecycle.add(insert, session, now_s))

    def _accepted(self, insert: Insert | Embed, request: LiveRequest) -> Accepted:
        state = _STATES[request.phase]
        return Accepted(insert.call, self._epoch, request.id, len(request.log), request.seed, state)

    def _check_ids(self, insert: Insert | Embed) -> None:
        model = self._context.model
        if isinstance(insert, Embed):
            vectors = Vectors(insert.texts, insert.second, insert.output, insert.dimensions)
            check_vectors(vectors, model, self._limits)
            return
        if not model.generates:
            raise BadRequest(no_generation(model.name))
        if insert.images:
            if model.vision is None:
                raise BadRequest(f"images: {no_vision(model.name)}")
            check_images(insert.prompt, insert.images, model.vision, self._limits)
        ids = {
            "prompt": insert.prompt,
            "emitted": insert.emitted,
            "stop_token_ids": insert.stop_token_ids,
            "prediction": insert.prediction,
            "forced": insert.forced,
            "constraint.after": [] if insert.constraint is None else insert.constraint.after,
            "thinking_max": [] if insert.thinking_max is None else marker_ids(insert.thinking_max),
        }
        check_token_ids(model.vocab_size, insert.sampling, **ids)
        check_min_tokens(insert.sampling, insert.max_tokens)
        allowed = self._limits.prefill_keep
        check_keep(insert.prefill_keep, allowed=allowed, images=bool(insert.images), pin=insert.pin)
        check_prediction(insert.prediction, self._limits.prediction_tokens_max)
        check_forced(insert.forced, insert.max_tokens, constrained=insert.constraint is not None)

    def _check_held(self, insert: Insert | Embed, session: Session) -> None:
        bytes_max = self._context.config.token_log_bytes_max
        requests_max = self._limits.requests_per_session_max
        held = self._sessions.forget_oldest_delivered(session, bytes_max=bytes_max, requests_max=requests_max)
        if len(session.requests) >= requests_max:
            what = f"{len(session.requests)} requests"
        elif held > bytes_max and isinstance(insert, Embed):
            # Vectors are held until they are acknowledged. Tokens take little memory, and log-probabilities may be
            # dropped.
            what = f"{held} bytes of output"
        else:
            return
        raise Overloaded(
            f"the session holds {what}; acknowledge those that have ended",
            retry_after_ms=self._lifecycle.retry_after_ms(),
        )

    def _abort(self, command: Abort, session: Session) -> None:
        request = session.requests.get(command.request)
        if request is None:
            session.remember_early_abort(command.request)
        elif request.end is None:
            self._lifecycle.end(request, "abort")

    def _resume(self, command: Resume, session: Session) -> Replay:
        if command.epoch != self._epoch:
            raise StaleEpoch("the worker has restarted; say hello and insert again with `emitted`")
        request = session.requests.get(command.request)
        if request is None:
            raise UnknownRequest(f"the worker holds no request {command.request!r}")
        if command.from_index < request.log.kept_from:
            # A new insert with the same id computes the tokens and log-probabilities again.
            self._lifecycle.end_all(
                [request], "abort", "a resume requested log-probabilities that were dropped"
            )
            self._sessions.acknowledge(session, request)
            raise UnknownRequest(
                f"the worker holds log-probabilities of {command.request!r} from token {request.log.kept_from} on: "
                "insert it again with `emitted`"
            )
        start = min(command.from_index, len(request.log))
        stop = request.log.stop_within(start, REPLAY_BYTES_MAX)
        more = stop < len(request.log)
        end = None if more else request.end
        self._counters.resumes += 1
        return Replay(command.call, self._epoch, request.log.row(request.id, start, stop, end), more=more)

    def _ack(self, command: Ack, session: Session) -> None:
        for request_id in command.requests:
            request = session.requests.get(request_id)
            if request is not None and request.end is not None:
                self._sessions.acknowledge(session, request)

    def _bye(self, session: Session) -> None:
        self._lifecycle.end_all(session.requests.values(), "abort", "the session ended")
        self._sessions.remove(session)
