"""The life of a request: taken in, prepared, put in line for a row, and ended with its one terminal answer."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from zmqengine.errors import Draining, ZmqEngineError
from zmqengine.protocol.messages import End, Finish, Insert
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.deadlines import Deadlines
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.preparing import Preparation, Preparer, both, preparation_of
from zmqengine.worker.requests.prompt_disk import PromptDisk
from zmqengine.worker.scheduler.rows import Rows
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.session import Session

if TYPE_CHECKING:
    from zmqengine.engine.prompts_on_disk import PromptsOnDisk

log = logging.getLogger("zmqengine.worker")


class Lifecycle:
    """Every request that has not ended. Whatever becomes of one, it ends here, and only once."""

    def __init__(
        self, context: WorkerContext, rows: Rows, outgoing: Outgoing, disk: PromptsOnDisk | None
    ) -> None:
        self._context = context
        self._counters = context.counters
        self._rows = rows
        self._outgoing = outgoing
        self._preparer = Preparer(context.board.wakeup.ring)
        ledger = rows.admission.ledger
        self.prompt_disk = PromptDisk(disk, self._preparer, lambda: ledger.prompt_cache_bytes)
        self._deadlines = Deadlines()
        self._live: dict[LiveRequest, None] = {}
        self._draining = False

    # --- what is there ---

    def live(self) -> Iterator[LiveRequest]:
        """Every request that has not ended, in order of arrival."""
        return iter(list(self._live))

    @property
    def is_empty(self) -> bool:
        """Whether no request is alive."""
        return not self._live

    @property
    def waiting(self) -> int:
        """How many requests have no row: preparing, queued or parked."""
        return len(self._live) - len(self._rows.running)

    @property
    def parked(self) -> int:
        """How many of those had one before."""
        return sum(request.phase == "parked" for request in self._live)

    def waits_for(self, request: LiveRequest, now_s: float) -> str:
        """The reason why a request without a row waits; empty if it has one."""
        if request.phase == "preparing":
            return "preparation"
        return self._rows.waits_for(request, now_s) if request.phase in ("queued", "parked") else ""

    # --- its beginning ---

    def add(self, insert: Insert, session: Session, now_s: float) -> LiveRequest:
        """Take in a request whose ids have been checked.

        Raises `Draining`, `BadRequest`, `ContextExceeded`, `NeverFits`, `Overloaded`, `NotAuthorized` or
        `DeadlineExceeded`; then nothing of it is kept.
        """
        if self._draining:
            raise Draining("the worker is draining: it takes no new requests")
        cache_scope = self._cache_scope(insert, session)
        looking = self.prompt_disk.preparation(insert, cache_scope)
        preparation = both(preparation_of(insert, self._context.compiler), looking)
        ticket, tokens_max = self._rows.admission.ticket(insert, session, len(self._rows.running), now_s)
        stops = frozenset(insert.stop_token_ids)
        request = LiveRequest(
            insert,
            session.id,
            ticket,
            seed=secrets.randbits(63) if insert.seed is None else insert.seed,
            stop_token_ids=stops if insert.ignore_eos else stops | self._context.model.eos_token_ids,
            tokens_max=tokens_max,
            cache_scope=cache_scope,
        )
        request.arrival_pass = self._counters.passes
        self._live[request] = None
        self._counters.accepted += 1
        session.requests[request.id] = request
        self._outgoing.accept(request)
        self._deadlines.add(request)
        self._start(request, preparation, now_s)
        return request

    def take_prepared(self, now_s: float) -> None:
        """Put those in line that are prepared, and go on with prompts that come from disk."""
        for request, error in self._preparer.finished():
            if error is not None:
                code = error.code if isinstance(error, ZmqEngineError) else ""
                if not code:
                    log.error("preparing failed", extra={"request": request.id}, exc_info=error)
                self.finish(request, "error", str(error), code)
            elif request.is_whole:
                self.finish(request, "stop")
            elif not self.prompt_disk.take(request):
                self._rows.enqueue(request, now_s)
        for request in self.prompt_disk.restored(is_busy=bool(self._rows.running)):
            self._rows.enqueue(request, now_s)

    def _cache_scope(self, insert: Insert, session: Session) -> str:
        """Rows of the same one share what they read. It outlives the worker, as the session's secret does."""
        scope = insert.cache_scope or self._context.config.cache_scope
        if scope == "shared":
            return ""
        if scope == "key" and session.user:
            return f"key {session.user}"
        return f"session {session.secret_digest.hex()}"

    def _start(self, request: LiveRequest, preparation: Preparation | None, now_s: float) -> None:
        insert = request.insert
        assert insert is not None
        if insert.emitted and insert.emitted[-1] in request.stop_token_ids:
            self.finish(request, "stop")
        elif request.tokens_held >= request.tokens_max:
            self.finish(request, "length")
        elif preparation is not None:
            self._preparer.start(request, preparation)
        else:
            self._rows.enqueue(request, now_s)

    # --- its end ---

    def end(self, request: LiveRequest, finish: Finish, message: str, code: str = "") -> None:
        """Give a request its terminal answer, in whatever phase it is. `code` says more of an `error`."""
        if request.phase == "preparing":
            self._preparer.cancel(request)
        else:
            self._rows.leave(request)
        self.finish(request, finish, message, code)

    def end_all(self, requests: Iterable[LiveRequest], finish: Finish, message: str) -> None:
        """End those of the requests that have not ended."""
        for request in list(requests):
            if request.end is None:
                self.end(request, finish, message)

    def expire(self, now_s: float) -> None:
        """End what has passed its deadline."""
        for request in self._deadlines.expired(now_s):
            self.end(request, "deadline", "deadline_ms passed before the last token")

    def next_deadline_s(self) -> float | None:
        """When a request runs out of time next, or None."""
        return self._deadlines.next_s()

    def drain(self) -> None:
        """Take no more requests, and end those that have not started. What has started goes on."""
        self._draining = True
        waiting = [request for request in self._live if request.phase in ("preparing", "queued")]
        self.end_all(waiting, "shutdown", "the worker stopped before this request was started")

    def retry_after_ms(self) -> int:
        """When it is worth trying again, from the measured rate of service."""
        return self._rows.admission.rates.retry_after_ms()

    def close(self) -> None:
        """Give up what is being prepared."""
        self._preparer.close()

    def finish(self, request: LiveRequest, finish: Finish, message: str = "", code: str = "") -> None:
        """The terminal answer of a request that the engine has no row of."""
        self._rows.accounts.end(request)
        self._rows.forget(request)
        self._deadlines.discard(request)
        self.prompt_disk.forget(request)
        del self._live[request]
        phases_ms = self._counters.latencies.phases_ms(request)
        facts = (request.prompt_tokens, request.cached_tokens, code, *phases_ms, request.drafts)
        request.finish(End(finish, message, *facts))
        self._outgoing.ended(request)
        self._counters.count_end(finish)
        self._counters.latencies.ended(request)
        log.info(
            "ended",
            extra={
                "request": request.id,
                "session": request.session_id,
                "finish": finish,
                "tokens": len(request.log),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
            },
        )
