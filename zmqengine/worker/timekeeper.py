"""What is due: deadlines, leases, grace periods, watermarks, the drain."""

from __future__ import annotations

import logging
from collections.abc import Callable

from zmqengine.config import WorkerConfig
from zmqengine.worker.board import Board
from zmqengine.worker.commands import CommandHandler
from zmqengine.worker.endings import Endings
from zmqengine.worker.publisher import Publisher
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import Session, SessionTable

log = logging.getLogger("zmqengine.worker")

WATERMARK_S = 1.0
HOUSEKEEPING_S = 0.05
IDLE_WAIT_MS_MAX = 10_000
ACK_WAIT_S = 2.0
"""After the last request of a drain, for front-ends to read and acknowledge."""


class Timekeeper:
    """Ends what has run out of time. `keep` is cheap enough for every pass."""

    def __init__(
        self,
        config: WorkerConfig,
        board: Board,
        scheduler: Scheduler,
        sessions: SessionTable,
        commands: CommandHandler,
        publisher: Publisher,
        endings: Endings,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._board = board
        self._scheduler = scheduler
        self._sessions = sessions
        self._commands = commands
        self._publisher = publisher
        self._endings = endings
        self._clock = clock
        self._housekeeping_s = 0.0
        self._drain_deadline_s: float | None = None
        self._ack_deadline_s: float | None = None

    def keep(self, now_s: float) -> None:
        """Do what is due by now."""
        for request in self._scheduler.expired(now_s):
            self._endings.end(request, "deadline", "deadline_ms passed before the last token")
        while self._board.to_end:
            self._end_for_operator(*self._board.to_end.popleft())
        if self._board.drain_requests:
            self._keep_draining(now_s)
        if now_s < self._housekeeping_s and self._scheduler.has_work:
            return
        self._housekeeping_s = now_s + HOUSEKEEPING_S
        for session in list(self._sessions):
            self._keep_session(session, now_s)

    def idle_wait_ms(self) -> int:
        """How long there is nothing to do if nobody sends anything."""
        now_s = self._clock()
        due = [now_s + IDLE_WAIT_MS_MAX / 1000]
        due += [when for when in (self._drain_deadline_s, self._ack_deadline_s) if when is not None]
        for session in self._sessions:
            due.append(session.lease_deadline_s)
            if session.grace_deadline_s is not None:
                due.append(session.grace_deadline_s)
            if session.requests:
                due.append(session.watermark_s)
        due += [session.retry_s for session in self._endings.dirty if session.is_granted]
        return max(1, min(IDLE_WAIT_MS_MAX, int((min(due) - now_s) * 1000) + 1))

    @property
    def is_drained(self) -> bool:
        """Whether all is done and read, or there is no more time to wait for readers."""
        if self._ack_deadline_s is None:
            return False
        unread = any(session.requests for session in self._sessions)
        return not unread or self._clock() >= self._ack_deadline_s or self._board.drain_requests > 1

    def _end_for_operator(self, session_id: str, request_id: str) -> None:
        for session in self._sessions:
            request = session.requests.get(request_id) if session.id == session_id else None
            if request is not None and request.end is None:
                self._endings.end(request, "abort", "an operator ended this request")

    def _keep_session(self, session: Session, now_s: float) -> None:
        if now_s >= session.lease_deadline_s:
            log.warning("lease ran out", extra={"session": session.id, "client": session.client})
            self._endings.end_session(session, "lease")
        elif session.grace_deadline_s is not None and now_s >= session.grace_deadline_s:
            log.warning("front-end vanished", extra={"session": session.id, "client": session.client})
            self._endings.end_session(session, "abort")
        elif session.lagging and session.unsent_tokens > self._config.session_backlog_tokens_max:
            self._endings.end_live(
                session, "slow_consumer", "the front-end fell behind by more than its budget"
            )
        elif session.requests and now_s >= session.watermark_s:
            session.watermark_s = now_s + WATERMARK_S
            self._publisher.watermark(session)

    def _keep_draining(self, now_s: float) -> None:
        if self._drain_deadline_s is None:
            self._start_draining(now_s)
        if now_s >= (self._drain_deadline_s or 0.0) or self._board.drain_requests > 1:
            for request in list(self._scheduler.running.values()):
                self._endings.end(request, "shutdown", "the worker stopped before the last token")
        if not self._scheduler.has_work and self._ack_deadline_s is None:
            self._ack_deadline_s = now_s + ACK_WAIT_S

    def _start_draining(self, now_s: float) -> None:
        log.info(
            "draining", extra={"running": len(self._scheduler.running), "queued": self._scheduler.queued}
        )
        self._board.state = "draining"
        self._commands.draining = True
        self._drain_deadline_s = now_s + self._config.drain_timeout_s
        for request in list(self._scheduler.waiting()):
            self._endings.end(request, "shutdown", "the worker stopped before this request was started")
