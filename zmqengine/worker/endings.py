"""Exactly one terminal answer for every request, and what is left to publish."""

from __future__ import annotations

import logging

from zmqengine.protocol.messages import End, Finish
from zmqengine.worker.counters import Counters
from zmqengine.worker.publisher import Publisher
from zmqengine.worker.request import LiveRequest
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import Session, SessionTable

log = logging.getLogger("zmqengine.worker")

LAG_RETRY_S = 0.02


class Endings:
    """Ends requests and sessions. `leaving_rows` are rows the engine has yet to drop; `dirty` sessions have news."""

    def __init__(
        self, scheduler: Scheduler, sessions: SessionTable, publisher: Publisher, counters: Counters
    ) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._publisher = publisher
        self._counters = counters
        self.leaving_rows: list[int] = []
        self.dirty: dict[Session, None] = {}
        self.count = 0

    def end(self, request: LiveRequest, finish: Finish, message: str, *, in_engine: bool = True) -> None:
        """Give a request its terminal answer, in whatever phase it is.

        `in_engine` is false when the engine has dropped the row already.
        """
        if request.phase == "running" and in_engine:
            self.leaving_rows.append(request.row)
        self._scheduler.leave(request)
        request.finish(End(finish, message, request.prompt_tokens, request.cached_tokens))
        request.session.dirty[request] = None
        request.session.progress.pop(request, None)
        self.dirty[request.session] = None
        self.count += 1
        self._counters.count_end(finish)
        self._counters.latencies.ended(request)
        log.info(
            "ended",
            extra={
                "request": request.id,
                "session": request.session.id,
                "finish": finish,
                "tokens": len(request.log),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
            },
        )

    def end_live(self, session: Session, finish: Finish, message: str) -> None:
        """End every request of a session that has not ended."""
        for request in [request for request in session.requests.values() if request.end is None]:
            self.end(request, finish, message)

    def end_session(self, session: Session, finish: Finish) -> None:
        """End its requests, tell it if it can still be told, and forget it."""
        self.end_live(session, finish, "the session ended")
        self._publisher.publish(session)
        self.dirty.pop(session, None)
        self._sessions.remove(session)

    def publish(self, now_s: float) -> None:
        """One frame for each session that has news; one that lags is tried again a little later."""
        for session in list(self.dirty):
            if session.lagging and now_s < session.retry_s:
                continue
            session.retry_s = now_s + LAG_RETRY_S
            if self._publisher.publish(session) and not session.dirty:
                del self.dirty[session]
