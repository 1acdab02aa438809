"""Inserts requests at the worker, again after the worker has restarted or forgotten them.

Requests that the worker would reject are rejected here, before anything is sent.
"""

from __future__ import annotations

import functools
from math import inf

import msgspec

from zmqengine.errors import BadRequest, DeadlineExceeded, RequestError, TooLarge, WorkerLost, ZmqEngineError
from zmqengine.protocol.messages import Accepted, Embed, End, Insert, Limits, ModelCard, Rejected, ThinkingMax
from zmqengine.request_rules import (
    NO_CONSTRAINT,
    check_context,
    check_forced,
    check_keep,
    check_min_tokens,
    check_token_ids,
    marker_ids,
    no_generation,
    no_vision,
)
from zmqengine_client.core.calls import CallTable
from zmqengine_client.core.connection import Connection, Opening, SessionConfig
from zmqengine_client.core.embedding import check_embed, embed_message, end_of_embed
from zmqengine_client.core.live_requests import LiveRequests
from zmqengine_client.core.options import insert_of
from zmqengine_client.core.outbox import ClientEvent, MakePixels
from zmqengine_client.core.phases import Phase, RequestEvent, RequestPhase
from zmqengine_client.core.request import Request
from zmqengine_client.images.prompt_image import WANTED_MAX, no_room

RETRY_AFTER_S = 0.25
IMAGE_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of images that the worker has not answered before those of further requests wait until it wants them: seven of
12 megapixels. It answers within a step, unless it hangs."""
RETRIED_AFTER_RESTART = ("not_ready", "overloaded")


class Inserting:
    """Sends inserts and handles their replies. Only while the connection is live."""

    def __init__(
        self, config: SessionConfig, connection: Connection, calls: CallTable, live: LiveRequests
    ) -> None:
        self._config = config
        self._connection = connection
        self._calls = calls
        self._live = live
        self._put_off: set[Request] = set()
        # A lower bound: a request that was put off may have ended since.
        self.due_at = inf

    def insert(self, request: Request, now: float) -> None:
        """Send the insert, unless the output is complete or the worker would reject it."""
        connection = self._connection
        assert connection.limits is not None
        limits = connection.limits
        request.retry_at = inf
        error = refusal(request, limits, connection.model)
        if error is None and now >= request.deadline_at:
            error = DeadlineExceeded("deadline_ms passed before the last token")
        if error is not None:
            self._live.end(request, error=error)
            return
        request.end = end_of(request, connection.eos_token_ids)
        if request.end is not None:
            self._live.end(request)
            return
        if request.id in self._live.acks:
            self._live.acks.flush(now)
        self._send_pixels(request, now, limits)
        if request.ended:
            return
        call = self._calls.prepare(
            lambda call: insert_message(call, connection.epoch, request, now, limits), now, request
        )
        error = size_refusal(call.frames[1], limits)
        if error is not None:
            self._live.end(request, error=error)
            return
        request.follow(RequestEvent.INSERTED)
        request.inserted_tokens = request.have
        self._calls.start(call, now)

    def restore(self, request: Request, opening: Opening, now: float) -> None:
        """Insert or end a request that the worker of a new connection does not hold."""
        if request.phase is RequestPhase.WAITING:
            self.insert(request, now)
        elif not (self._config.resume or not (opening.restarted or request.may_have_run)):
            error = WorkerLost("the worker died while it generated; resume is off")
            self._live.end(request, error=error)
        elif not opening.same_model:
            self._live.end(request, error=WorkerLost("the worker came back with another model"))
        else:
            if opening.restarted:
                self._tell_resumed(request)
            self.insert(request, now)

    def insert_forgotten(self, request: Request, now: float) -> None:
        """Insert again a request that a running worker has forgotten."""
        if self._config.resume:
            self.insert(request, now)
        else:
            self._live.end(request, error=WorkerLost("the worker forgot the request; resume is off"))

    def accepted(self, request: Request, accepted: Accepted) -> None:
        """Note that the worker has accepted the request."""
        if request.may(RequestEvent.ACCEPTED):
            request.follow(RequestEvent.ACCEPTED)
            request.was_accepted = True
            request.images_wanted = 0
            request.seed = accepted.seed

    def rejected(self, request: Request, error: ZmqEngineError, now: float) -> None:
        """The worker rejected the insert: end the request, unless it ran in an earlier worker and may wait."""
        has_run = request.may_have_run or request.resumed > 0
        # An embed is one of many messages, and batch work: it waits for its place in the queue.
        waits = has_run or request.texts is not None
        if request.aborting:
            self._live.end(request, finish="abort")
        elif not waits or error.code not in RETRIED_AFTER_RESTART:
            self._live.end(request, error=error)
        elif now - max(self._connection.phase_since, request.added_at) >= self._config.worker_lost_timeout_s:
            if has_run:
                error = WorkerLost(f"the restarted worker has no room: {error.message}")
            self._live.end(request, error=error)
        elif request.may(RequestEvent.REFUSED_FOR_NOW):
            request.follow(RequestEvent.REFUSED_FOR_NOW)
            wait_s = RETRY_AFTER_S if error.retry_after_ms is None else error.retry_after_ms / 1000
            request.retry_at = now + wait_s
            self._put_off.add(request)
            self.due_at = min(self.due_at, request.retry_at)

    def want_images(self, request: Request, rejected: Rejected, now: float) -> None:
        """The worker lacks images of the request: have their pixels made, and insert it again with them."""
        missing = [image for image in request.images if image.ref.hash in rejected.wanted]
        if request.aborting:
            self._live.end(request, finish="abort")
        elif not missing or request.images_wanted >= WANTED_MAX:
            self._live.end(request, error=no_room(request.images))
        elif request.may(RequestEvent.REFUSED_FOR_NOW):
            request.follow(RequestEvent.REFUSED_FOR_NOW)
            request.images_wanted += 1
            self._calls.outbox.actions.append(MakePixels(request, missing))

    def pixels_made(self, request: Request, now: float) -> None:
        """The pixels that the worker wanted are there."""
        if request.aborting:
            self._live.end(request, finish="abort")
        elif request.phase is RequestPhase.PUT_OFF and self._connection.phase is Phase.LIVE:
            self._insert_again(request, now)

    def _send_pixels(self, request: Request, now: float, limits: Limits) -> None:
        """Send the pixels that were made and not sent yet. They arrive before an insert that is sent after them.

        If the worker has many to answer they are dropped: it asks for them when it reads the insert.
        """
        if self._calls.image_bytes > IMAGE_BYTES_MAX:
            for image in request.images:
                image.body = None
        epoch, options = self._connection.epoch, request.options
        for image in request.images:
            body, image.body = image.body, None
            if body is None:
                continue
            call = self._calls.prepare_image(
                functools.partial(
                    body.frames,
                    epoch=epoch,
                    hash_=image.ref.hash,
                    grids=image.ref.grids,
                    cache_scope=options.cache_scope,
                    cache_salt=options.cache_salt,
                ),
                now,
                request,
            )
            error = size_refusal(call.frames[1], limits)
            if error is not None:
                self._live.end(request, error=error)
                return
            self._calls.start(call, now)

    def go_down(self) -> None:
        """Handle a lost connection: postponed requests are inserted with all others."""
        self._put_off.clear()
        self.due_at = inf

    def advance(self, now: float) -> None:
        """Insert postponed requests again."""
        if now < self.due_at:
            return
        self._put_off = {one for one in self._put_off if one.phase is RequestPhase.PUT_OFF}
        for request in [one for one in self._put_off if now >= one.retry_at]:
            self._put_off.discard(request)
            self._insert_again(request, now)
        self.due_at = min((one.retry_at for one in self._put_off), default=inf)

    def _insert_again(self, request: Request, now: float) -> None:
        """Insert a postponed request, unless the worker holds it by now."""
        if request.have > request.inserted_tokens:
            # It has made tokens: a copy of the refused insert, sent before the refusal came, was accepted. An insert
            # with these tokens would conflict with it.
            request.follow(RequestEvent.HELD)
            self._live.resume(request, now)
        else:
            self.insert(request, now)

    def _tell_resumed(self, request: Request) -> None:
        request.resumed += 1
        outbox = self._calls.outbox
        outbox.counters.resumed_streams += 1
        outbox.events.append(ClientEvent("resumed", f"continues at token {request.have}", request.id))


def refusal(request: Request, limits: Limits, model: ModelCard | None) -> ZmqEngineError | None:
    """The error with which this worker would reject the request, or None. Sets the output's maximum length."""
    options = request.options
    if request.texts is not None:
        try:
            if model is not None:
                check_embed(request.texts, limits, model)
        except RequestError as error:
            return error
        return None
    room = limits.context_tokens_max - len(request.prompt)
    request.max_tokens = options.max_tokens or room
    request.open_ended = options.max_tokens is None and limits.open_max_tokens
    if model is not None and not model.generates:
        return BadRequest(no_generation(model.name))
    try:
        check_context(request.prompt, options.max_tokens, limits.context_tokens_max)
        if request.images and model is not None and not limits.images_max:
            return BadRequest(f"images: {no_vision(model.name)}")
        if len(request.images) > limits.images_max:
            return BadRequest(
                f"images: {len(request.images)}, the worker takes {limits.images_max} in one request"
            )
        if options.constraint is not None and not limits.constraints:
            return BadRequest(NO_CONSTRAINT)
        if (options.cache_scope is not None or options.pin) and not limits.cache_scope:
            return BadRequest("this worker is older than cache_scope and pin")
        if options.cache_salt and not limits.cache_salt:
            return BadRequest("this worker is older than cache_salt")
        if not options.speculate and not limits.speculation:
            return BadRequest("this worker does not support the option speculate")
        if options.forced and not limits.forced:
            return BadRequest("this worker does not support the option forced")
        if options.thinking_max is not None and not limits.thinking_max:
            return BadRequest("this worker does not support the option thinking_max")
        check_min_tokens(options.sampling, options.max_tokens)
        allowed = limits.prefill_keep
        check_keep(options.prefill_keep, allowed=allowed, images=bool(request.images), pin=options.pin)
        check_forced(options.forced, options.max_tokens, constrained=options.constraint is not None)
        if model is not None:
            check_token_ids(
                model.vocab_size,
                options.sampling,
                prompt=request.prompt,
                stop_token_ids=options.stop_token_ids,
                prediction=[] if isinstance(options.prediction, str) else options.prediction,
                forced=options.forced,
                thinking_max=marker_ids(options.thinking_max)
                if isinstance(options.thinking_max, ThinkingMax)
                else [],
            )
    except RequestError as error:
        return error
    return None


def size_refusal(body: bytes | memoryview, limits: Limits) -> ZmqEngineError | None:
    """The error for a message longer than the worker's limit, or None."""
    if len(body) <= limits.frame_bytes_max:
        return None
    return TooLarge(
        f"the request has {len(body)} bytes, the worker takes {limits.frame_bytes_max}: shorten it"
    )


def insert_message(call: int, epoch: bytes, request: Request, now: float, limits: Limits) -> Insert | Embed:
    """The insert command, with the output so far as `emitted` and the remaining time as `deadline_ms`; or the embed.

    A prediction is cut to the worker's limit.
    """
    options = request.options
    deadline_ms = options.deadline_ms
    if deadline_ms is not None:
        deadline_ms = max(1, round((request.deadline_at - now) * 1000))
    if request.texts is not None:
        return embed_message(request.texts, request.have, call, epoch, deadline_ms)
    insert = insert_of(options)
    return msgspec.structs.replace(
        insert,
        call=call,
        epoch=epoch,
        prompt=request.prompt,
        max_tokens=None if request.open_ended else request.max_tokens,
        emitted=list(request.tokens),
        seed=request.seed,
        deadline_ms=deadline_ms,
        prediction=insert.prediction[: limits.prediction_tokens_max],
        images=[image.ref for image in request.images],
    )


def end_of(request: Request, eos_token_ids: frozenset[int]) -> End | None:
    """The lost end of a request, if the received tokens are a complete output."""
    tokens, options = request.tokens, request.options
    if request.texts is not None:
        return end_of_embed(request.texts, request.have)
    if not tokens:
        return None
    stops = tokens[-1] in options.stop_token_ids or (not options.ignore_eos and tokens[-1] in eos_token_ids)
    if stops and len(tokens) > len(options.forced):
        return End("stop", prompt_tokens=len(request.prompt))
    if len(tokens) >= request.max_tokens:
        return End("length", prompt_tokens=len(request.prompt))
    return None
