"""Timers of the actor: deadlines, leases, grace periods, watermarks, the drain, and idle housekeeping."""

from __future__ import annotations

import logging

from zmqengine.protocol.messages import Finish
from zmqengine.worker.batch import Batch
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.idle import Idle
from zmqengine.worker.intake.sessions import SessionTable
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.process.heap import Heap
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.session import Session
from zmqengine.worker.wire.sockets import Sockets

log = logging.getLogger("zmqengine.worker")

WATERMARK_S = 1.0
"""Seconds between two watermarks of a session with requests: the time in which a client notices a lost last frame."""
HOUSEKEEPING_S = 0.05
"""Seconds between two looks at leases, watermarks and deadlines: a pass may take less than a millisecond."""
MEMORY_S = 1.0
"""Seconds between two looks at the machine's memory: pressure and other workers' claims."""
KEYS_S = 5.0
"""Seconds between two looks at the files of keys, if sessions have any: for so long a removed key may go on."""
TOUCH_S = 3600.0
"""Seconds between two touches of the files in /tmp, which macOS removes after 3 days without one."""
IDLE_WAIT_MS_MAX = 10_000
"""Maximum milliseconds that an idle actor waits."""
ACK_WAIT_S = 2.0
"""Seconds after the last request of a drain for front-ends to read and acknowledge."""


class Timers:
    """Ends requests and sessions whose time is up. `keep` is cheap enough for every pass."""

    def __init__(
        self,
        context: WorkerContext,
        sessions: SessionTable,
        scheduler: Scheduler,
        lifecycle: Lifecycle,
        batch: Batch,
        outgoing: Outgoing,
        sockets: Sockets,
        heap: Heap,
    ) -> None:
        self._context = context
        self._sockets = sockets
        self._sessions = sessions
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._batch = batch
        self._outgoing = outgoing
        self._housekeeping_s = self._memory_s = self._keys_s = self._touch_s = 0.0
        self._forgiving_until_s = 0.0
        self._drain_deadline_s: float | None = None
        self._ack_deadline_s: float | None = None
        self._idle = Idle(context, batch, heap)

    def keep(self, now_s: float) -> None:
        """Run the timers that are due."""
        self._lifecycle.expire(now_s)
        self._idle.keep(now_s)
        while self._context.shared_status.to_end:
            self._end_for_operator(*self._context.shared_status.to_end.popleft())
        if self._context.shared_status.drain_requests:
            self._keep_draining(now_s)
        if now_s < self._housekeeping_s and self._batch.has_work:
            return
        self._housekeeping_s = now_s + HOUSEKEEPING_S
        for session in list(self._sessions):
            self._keep_session(session, now_s)
        if now_s >= self._memory_s:
            self._memory_s = now_s + MEMORY_S
            self._keep_memory_share()
            self._relieve_memory()
            self._sockets.keep_cmd_and_out()
        if now_s >= self._keys_s:
            self._keys_s = now_s + KEYS_S
            self._end_sessions_of_removed_keys()
        if now_s >= self._touch_s:
            self._touch_s = now_s + TOUCH_S
            self._touch_files()

    def stood_still(self, seconds: float, now_s: float) -> None:
        """Give every session a whole lease after an interruption: no command was read while this process or the machine
        was stopped, and a lost connection may take its front-end a while to replace."""
        log.info("the worker was interrupted", extra={"seconds": round(seconds, 1)})
        self._idle.unwire()
        self._forgiving_until_s = now_s + self._context.config.lease_ms / 1000
        for session in self._sessions:
            session.lease_deadline_s = self._forgiving_until_s

    def idle_wait_ms(self) -> int:
        """Milliseconds until the next due timer."""
        now_s = self._context.clock()
        due = [now_s + IDLE_WAIT_MS_MAX / 1000]
        others = (
            self._drain_deadline_s,
            self._ack_deadline_s,
            self._outgoing.next_retry_s(),
            self._lifecycle.next_deadline_s(),
            self._idle.next_s(),
        )
        due += [when for when in others if when is not None]
        for session in self._sessions:
            due.append(session.lease_deadline_s)
            if session.grace_deadline_s is not None:
                due.append(max(session.grace_deadline_s, self._forgiving_until_s))
            if session.requests:
                due.append(session.watermark_s)
            if session.user:
                due.append(self._keys_s)
        return max(1, min(IDLE_WAIT_MS_MAX, int((min(due) - now_s) * 1000) + 1))

    @property
    def is_drained(self) -> bool:
        """Whether every request has ended and was acknowledged, or the time for draining is over."""
        if self._ack_deadline_s is None:
            return False
        unread = any(session.requests for session in self._sessions)
        return (
            not unread
            or self._context.clock() >= self._ack_deadline_s
            or self._context.shared_status.drain_requests > 1
        )

    @property
    def drain_left_s(self) -> float:
        """Remaining seconds of the time for draining."""
        if self._drain_deadline_s is None:
            return 0.0
        return max(0.0, self._drain_deadline_s - self._context.clock())

    def _keep_memory_share(self) -> None:
        share = self._context.memory_share
        view = None if share is None else share.look(self._batch.rows_decoding, self._batch.weights_bytes)
        if view is None:
            return
        self._batch.share_device(view.rows_decoding)
        self._scheduler.resize(view.limit_bytes, self._lifecycle.live())
        shared_status = self._context.shared_status
        if shared_status.facts.get("memory") != view.description:
            shared_status.facts = {**shared_status.facts, "memory": view.description}
            log.info("memory limit", extra={"memory": view.description})

    def _relieve_memory(self) -> None:
        level = self._context.memory_pressure()
        if level != self._scheduler.pressure:
            log.warning("memory pressure", extra={"level": level, "before": self._scheduler.pressure})
            self._scheduler.relieve(level)
            others = {
                name: fact for name, fact in self._context.shared_status.facts.items() if name != "pressure"
            }
            self._context.shared_status.facts = others if level == "normal" else {**others, "pressure": level}
            self._batch.release_buffers()
        elif level == "critical":
            # Once for each warning: small Macs have one for hours, and buffers save time.
            self._batch.release_buffers()

    def _touch_files(self) -> None:
        self._sockets.touch()
        if self._context.memory_share is not None:
            self._context.memory_share.touch()

    def _keep_session(self, session: Session, now_s: float) -> None:
        self._sessions.keep_output_within(session, self._context.config.token_log_bytes_max)
        if now_s >= session.lease_deadline_s:
            log.warning("lease ran out", extra={"session": session.id, "client": session.client})
            self._end_session(session, "lease")
        elif session.grace_deadline_s is not None and now_s >= max(
            session.grace_deadline_s, self._forgiving_until_s
        ):
            log.warning("front-end vanished", extra={"session": session.id, "client": session.client})
            self._end_session(session, "abort")
        elif self._outgoing.backlog_tokens(session) > self._context.config.session_backlog_tokens_max:
            self._lifecycle.end_all(
                session.requests.values(),
                "slow_consumer",
                "the front-end fell behind by more than its budget",
            )
        elif session.requests and now_s >= session.watermark_s:
            session.watermark_s = now_s + WATERMARK_S
            self._outgoing.watermark(session)

    def _end_sessions_of_removed_keys(self) -> None:
        users = {session.user for session in self._sessions if session.user}
        removed = {user for user in users if not self._context.is_authorized(user)}
        for session in [session for session in self._sessions if session.user in removed]:
            log.warning("its key was removed", extra={"session": session.id, "client": session.client})
            self._end_session(session, "abort")

    def _end_session(self, session: Session, finish: Finish) -> None:
        self._lifecycle.end_all(session.requests.values(), finish, "the session ended")
        self._sessions.remove(session)

    def _end_for_operator(self, session_id: str, request_id: str) -> None:
        for session in self._sessions:
            request = session.requests.get(request_id) if session.id == session_id else None
            if request is not None and request.end is None:
                self._lifecycle.end(request, "abort", "an operator ended this request")

    def _keep_draining(self, now_s: float) -> None:
        shared_status = self._context.shared_status
        if self._drain_deadline_s is None:
            log.info(
                "draining",
                extra={"running": len(self._scheduler.running), "waiting": self._lifecycle.waiting},
            )
            shared_status.state = "draining"
            self._lifecycle.drain()
            self._drain_deadline_s = now_s + self._context.config.drain_timeout_s
        if now_s >= self._drain_deadline_s or shared_status.drain_requests > 1:
            self._lifecycle.end_all(
                self._lifecycle.live(), "shutdown", "the worker stopped before the last token"
            )
        if not self._batch.has_work and self._ack_deadline_s is None:
            self._ack_deadline_s = now_s + ACK_WAIT_S
