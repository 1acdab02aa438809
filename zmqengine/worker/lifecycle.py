"""The life of a request: accepted, prepared, handed to the scheduler, and ended with its one terminal answer."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from zmqengine.engine.interface import RowImage
from zmqengine.errors import BadRequest, Draining, NotAuthorized, ZmqEngineError
from zmqengine.protocol.messages import CacheScope, Embed, End, Finish, Image, Insert
from zmqengine.request_rules import no_vision, vector_width
from zmqengine.worker.adapter_calls import WorkerAdapters
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.preparing.preparer import Preparation, Preparer, preparation_of
from zmqengine.worker.preparing.prompt_disk import PromptDisk
from zmqengine.worker.requests.deadlines import Deadlines
from zmqengine.worker.requests.images import ImageStore, SettledImage
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.session import Session

if TYPE_CHECKING:
    from zmqengine.engine.disk_cache import DiskCache

log = logging.getLogger("zmqengine.worker")


class Lifecycle:
    """Owns every request that has not ended, from `add` to `end`."""

    def __init__(
        self,
        context: WorkerContext,
        scheduler: Scheduler,
        outgoing: Outgoing,
        disk: DiskCache | None,
        adapters: WorkerAdapters,
    ) -> None:
        self._context = context
        self._adapters = adapters
        self._counters = context.counters
        self._shares, self._priorities_min = context.config.shares, context.config.priorities_min
        self._scheduler = scheduler
        self._outgoing = outgoing
        self._preparer = Preparer(context.shared_status.wakeup.wake)
        self.prompt_disk = PromptDisk(
            disk,
            self._preparer,
            -1 if context.model.vision is None else context.model.vision.token,
        )
        scheduler.away = self.prompt_disk
        model = context.model
        self.images: ImageStore | None = None
        """Pixels that front-ends sent; None for a model that sees no images."""
        if model.vision is not None:
            self.images = ImageStore(
                model.vision,
                bytes_max=scheduler.memory.pixels_bytes_max,
                patches_max=context.limits.image_patches_max,
                wake=context.shared_status.wakeup.wake,
            )
        self._deadlines = Deadlines()
        self._live: dict[LiveRequest, None] = {}
        self._arrivals = count()
        self._draining = False

    # --- the requests ---

    def live(self) -> Sequence[LiveRequest]:
        """Every request that has not ended, in order of arrival."""
        return list(self._live)

    @property
    def waiting(self) -> int:
        """Number of requests without a row: preparing, queued or parked."""
        return len(self._live) - len(self._scheduler.running)

    @property
    def parked(self) -> int:
        """Number of preempted requests without a row."""
        return sum(request.phase == "parked" for request in self._live)

    def waits_for(self, request: LiveRequest, now_s: float) -> str:
        """Reason for which a request has no row, for people; empty if it has one."""
        if request.phase == "preparing":
            return "preparation"
        return self._scheduler.waits_for(request, now_s) if request.phase in ("queued", "parked") else ""

    # --- start ---

    def check_authorized(self, command: Insert | Embed, session: Session) -> None:
        """Raise `NotAuthorized` if the session may not send this request; checked before all other reasons to refuse
        it."""
        urgency = int(self._priorities_min.of(session.client, session.user))
        if command.priority < urgency:
            raise NotAuthorized(
                f"priority {command.priority} is not allowed for this front-end: {urgency} is the most urgent"
            )

    def add(self, command: Insert | Embed, session: Session, now_s: float) -> LiveRequest:
        """Accept an authorized request whose token ids have been checked.

        Raises `Draining`, `BadRequest`, `ContextExceeded`, `NeverFits`, `Overloaded` or `DeadlineExceeded`; a refused
        request leaves no state.
        """
        if self._draining:
            raise Draining("the worker is draining: it takes no new requests")
        preparation: Preparation | None = None
        if isinstance(command, Embed):
            request = self._embed(command, session, now_s)
        else:
            request, preparation = self._insert(command, session, now_s)
        request.arrival_pass = self._counters.passes
        self._live[request] = None
        self._scheduler.admit(request)
        self._counters.accepted += 1
        session.requests[request.id] = request
        self._outgoing.accept(request)
        self._deadlines.add(request)
        self._start(request, preparation, now_s)
        return request

    def _embed(self, embed: Embed, session: Session, now_s: float) -> LiveRequest:
        width = vector_width(embed.output, embed.dimensions, self._context.model)
        longest = max(map(len, embed.texts))
        self._scheduler.check_fits(longest, f"a text of {longest} tokens")
        return LiveRequest(
            embed,
            session.id,
            self._ticket(embed, session, now_s),
            tokens_max=longest,
            vector_width=width,
            cache_scope=self._cache_scope(embed.cache_scope, embed.cache_salt, session),
        )

    def _insert(
        self, insert: Insert, session: Session, now_s: float
    ) -> tuple[LiveRequest, Preparation | None]:
        image_scope = cache_scope = self._cache_scope(insert.cache_scope, insert.cache_salt, session)
        if insert.adapter:
            # What is read with an adapter is of use to that one alone.
            cache_scope = f"{cache_scope}\nadapter {self._adapters.digest(insert.adapter)}"
        preparation = preparation_of(insert, self._context.compiler)
        tokens_max = self._scheduler.allowed_tokens(insert.prompt, insert.max_tokens)
        ticket = self._ticket(insert, session, now_s)
        # Last, as it may not be undone by another refusal.
        images: Sequence[RowImage] = ()
        if self.images is not None and insert.images:
            images = self.images.take(insert.images, image_scope)
        stops = frozenset(insert.stop_token_ids)
        request = LiveRequest(
            insert,
            session.id,
            ticket,
            # No longer than a float's digits: JavaScript reads every number as a float, and a front-end
            # that resumes sends the seed again.
            seed=secrets.randbits(sys.float_info.mant_dig) if insert.seed is None else insert.seed,
            stop_token_ids=stops if insert.ignore_eos else stops | self._context.model.eos_token_ids,
            tokens_max=tokens_max,
            cache_scope=cache_scope,
            images=images,
        )
        return request, preparation

    def keep_image(self, image: Image, session: Session) -> None:
        """Keep an image for requests. Raises `BadRequest`, `Overloaded` or, until its hash is known, `ImageArrives`."""
        if self.images is None:
            raise BadRequest(no_vision(self._context.model.name))
        scope = self._cache_scope(image.cache_scope, image.cache_salt, session)
        self.images.put(image, scope, self.retry_after_ms())

    def settled_images(self) -> Sequence[SettledImage]:
        """Images whose hash has become known since the last call."""
        return [] if self.images is None else self.images.settled()

    def take_prepared(self, now_s: float) -> None:
        """Enqueue the requests whose preparation is done, and advance the restoring of prompts from disk."""
        for request, result in self._preparer.finished():
            if isinstance(result, BaseException):
                code = result.code if isinstance(result, ZmqEngineError) else ""
                if not code:
                    log.error("preparing failed", extra={"request": request.id}, exc_info=result)
                self.end(request, "error", str(result), code)
                continue
            if result.blocks is not None:
                self.prompt_disk.receive(request, result.blocks)
                continue
            request.apply(result)
            if request.is_whole:
                self.end(request, "stop")
            else:
                self._scheduler.enqueue(request, now_s)
        for request in self.prompt_disk.advance(now_s, is_busy=bool(self._scheduler.running)):
            self._scheduler.enqueue(request, now_s)

    def _ticket(self, insert: Insert | Embed, session: Session, now_s: float) -> Ticket:
        """The scheduling facts of a request. Raises `Overloaded` or `DeadlineExceeded`."""
        # All sessions of one key are one flow; without keys each session is its own.
        flow = session.user or session.id
        self._scheduler.check_queue(flow)
        # None of a text's tokens are output, which `max_tokens` bounds.
        max_tokens = 0 if isinstance(insert, Embed) else insert.max_tokens
        ticket = Ticket(
            flow=flow,
            weight=self._shares.of(session.client, session.user),
            priority=insert.priority,
            prompt_tokens=sum(map(len, insert.texts)) if isinstance(insert, Embed) else len(insert.prompt),
            max_tokens=max_tokens,
            arrival=next(self._arrivals),
            waiting_since_s=now_s,
            deadline_s=None if insert.deadline_ms is None else now_s + insert.deadline_ms / 1000,
        )
        self._scheduler.check_deadline(ticket, now_s)
        return ticket

    def _cache_scope(self, wanted: CacheScope | None, salt: str, session: Session) -> str:
        """Scope of caches for a request or image. It outlives the worker, as the session's secret does.

        `salt` names a part of it, within which a front-end keeps one of its own callers.
        """
        scope = wanted or self._context.config.cache_scope
        if scope == "shared":
            return ""
        if scope == "key" and session.user:
            return f"key {session.user} {salt}"
        return f"session {session.secret_digest.hex()} {salt}"

    def _start(self, request: LiveRequest, preparation: Preparation | None, now_s: float) -> None:
        insert = request.insert
        assert insert is not None
        if isinstance(insert, Embed):
            self._scheduler.enqueue(request, now_s)
        elif len(insert.emitted) > len(insert.forced) and insert.emitted[-1] in request.stop_token_ids:
            self.end(request, "stop")
        elif request.prompt_tokens + request.output_tokens >= request.tokens_max:
            self.end(request, "length")
        elif preparation is not None:
            self._preparer.start(request, preparation)
        else:
            self._scheduler.enqueue(request, now_s)

    # --- end ---

    def end(self, request: LiveRequest, finish: Finish, message: str = "", code: str = "") -> None:
        """Give a request its terminal answer, in any phase. `code` refines an `error`."""
        self._preparer.cancel(request)
        self._scheduler.finish(request)
        self._deadlines.discard(request)
        self.prompt_disk.forget(request)
        del self._live[request]
        if self.images is not None and request.images:
            self.images.release(request.images, request.cache_scope)
        phases_ms = self._counters.latencies.phases_ms(request)
        facts = (request.prompt_tokens, request.cached_tokens, code, *phases_ms, request.drafts)
        request.finish(End(finish, message, *facts, request.kept_tokens))
        self._outgoing.ended(request)
        self._counters.count_end(finish)
        self._counters.latencies.ended(request)
        log.info(
            "ended",
            extra={
                "request": request.id,
                "session": request.session_id,
                "finish": finish,
                "vectors" if request.embeds else "tokens": len(request.log),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
            },
        )

    def end_all(self, requests: Iterable[LiveRequest], finish: Finish, message: str) -> None:
        """End the requests that have not ended."""
        for request in list(requests):
            if request.end is None:
                self.end(request, finish, message)

    def expire(self, now_s: float) -> None:
        """End the requests whose deadline has passed."""
        for request in self._deadlines.expired(now_s):
            self.end(request, "deadline", "deadline_ms passed before the last token")

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a live request or its preparation, or None."""
        due = [self._deadlines.next_s(), self.prompt_disk.next_deadline_s()]
        return min((when for when in due if when is not None), default=None)

    def drain(self) -> None:
        """Refuse new requests, and end waiting ones; running and preempted ones continue."""
        self._draining = True
        waiting = [request for request in self._live if request.phase in ("preparing", "queued")]
        self.end_all(waiting, "shutdown", "the worker stopped before this request was started")

    def image_numbers(self) -> dict[str, int]:
        """Numbers for `status` of a model that sees, by name."""
        images = self.images
        return {} if images is None else {"images": len(images), "image_pixels_bytes": images.bytes}

    def retry_after_ms(self) -> int:
        """Milliseconds after which a refused request should be tried again, from the measured rate of service."""
        return self._scheduler.rates.retry_after_ms()

    def close(self) -> None:
        """Cancel running preparations."""
        self._preparer.close()
        if self.images is not None:
            self.images.close()
