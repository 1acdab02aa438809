"""The actor: the loop on the main thread, and the only code that calls the engine.

One pass: grants -> commands -> deadlines and leases -> admit -> one `next()` -> settle -> publish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from zmqengine.config import WorkerConfig
from zmqengine.engine.interface import Engine, StepResult
from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.codec import command_decoder, encode, read_addressee
from zmqengine.protocol.messages import Command, End, Finish, Limits
from zmqengine.worker.board import Board, PassTimes
from zmqengine.worker.commands import CommandHandler
from zmqengine.worker.counters import Counters
from zmqengine.worker.publisher import Publisher
from zmqengine.worker.recovery import Recovery
from zmqengine.worker.request import LiveRequest
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import Session, SessionTable
from zmqengine.worker.watchdog import Watchdog

log = logging.getLogger("zmqengine.worker")

COMMANDS_SECONDS_MAX = 0.05
WATERMARK_S = 1.0
HOUSEKEEPING_S = 0.05
BOARD_S = 0.1
LAG_RETRY_S = 0.02
IDLE_WAIT_MS_MAX = 10_000
ACK_WAIT_S = 2.0


class EngineBroken(Exception):
    """The engine failed too often: the process has to end."""


@dataclass(slots=True)
class PassReport:
    """What one pass did."""

    grants: int = 0
    commands: int = 0
    admitted: int = 0
    stepped: bool = False
    tokens: int = 0
    ended: int = 0


class Actor:
    """Serves sessions on two sockets with one engine.

    Everything happens on the thread that built it. `clock` gives seconds and never goes back.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        cmd: zmq.Socket[bytes],
        out: zmq.Socket[bytes],
        board: Board,
        limits: Limits,
        *,
        kv_bytes_max: int,
        memory_limit_bytes: int | None = None,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engine = engine
        self._cmd = cmd
        self._out = out
        self._board = board
        self._watchdog = watchdog
        self._clock = clock
        self._memory_limit_bytes = memory_limit_bytes
        self._with_users = config.uses_curve
        self._decoder = command_decoder(config.frame_bytes_max)
        self.counters = Counters()
        self.times = PassTimes()
        self.sessions = SessionTable(
            sessions_max=config.sessions_max, lease_s=config.lease_ms / 1000, grace_s=config.grace_ms / 1000
        )
        self.scheduler = Scheduler(rows_max=engine.rows_max, kv_bytes_max=kv_bytes_max)
        self._recovery = Recovery(
            failures_max=config.engine_failures_max, window_s=config.engine_failures_window_s
        )
        self._publisher = Publisher(out, board.epoch, drop_share=config.fault_drop_frames)
        self._commands = CommandHandler(
            epoch=board.epoch,
            limits=limits,
            vocab_size=engine.info.vocab_size,
            eos_token_ids=engine.info.eos_token_ids,
            lease_ms=config.lease_ms,
            token_log_bytes_max=config.token_log_bytes_max,
            sessions=self.sessions,
            scheduler=self.scheduler,
            counters=self.counters,
            project_bytes=engine.project_bytes,
            end=self._end,
            end_session=self._end_session,
        )
        self._dirty: dict[Session, None] = {}
        self._leaving_rows: list[int] = []
        self._housekeeping_s = 0.0
        self._memory_check_s = 0.0
        self._board_s = 0.0
        self._drain_deadline_s: float | None = None
        self._ack_deadline_s: float | None = None
        self._ended = 0
        self._poller = zmq.Poller()
        for source in (cmd, out, board.wakeup):
            self._poller.register(source, zmq.POLLIN)
        # Whoever asks for the status as soon as the state is ready finds every number there.
        self._write_board()

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drained. Raises `EngineBroken` when the engine fails too often."""
        while not self._is_finished():
            self.run_pass(wait_ms=0 if self._has_work else self._idle_wait_ms())

    def run_pass(self, wait_ms: int = 0) -> PassReport:
        """One pass; with nothing to do, wait up to `wait_ms` for something first."""
        if wait_ms > 0:
            self._wait(wait_ms)
        started_ns = time.perf_counter_ns()
        now_s = self._board.pass_started_s = self._clock()
        if self._watchdog is not None:
            self._watchdog.beat(now_s)
        report = PassReport()
        ended_before = self._ended
        report.grants = self._read_subscriptions(now_s)
        report.commands = self._read_commands(now_s)
        self._keep_time(now_s)
        received_ns = time.perf_counter_ns()
        step_ns = self._step(report, now_s)
        stepped_ns = time.perf_counter_ns()
        self._publish(now_s)
        report.ended = self._ended - ended_before
        self.counters.passes += 1
        if now_s >= self._board_s or not self._has_work:
            self._board_s = now_s + BOARD_S
            self._write_board()
        self._measure(report, started_ns, received_ns, stepped_ns, step_ns)
        return report

    def close(self) -> None:
        """Stop the watchdog. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()

    @property
    def _has_work(self) -> bool:
        return bool(self.scheduler.running) or self.scheduler.queued > 0

    def _wait(self, wait_ms: int) -> None:
        if self._watchdog is not None:
            self._watchdog.pause()
        self._poller.poll(wait_ms)
        self._board.wakeup.clear()

    def _idle_wait_ms(self) -> int:
        now_s = self._clock()
        due = [now_s + IDLE_WAIT_MS_MAX / 1000]
        due += [when for when in (self._drain_deadline_s, self._ack_deadline_s) if when is not None]
        for session in self.sessions:
            due.append(session.lease_deadline_s)
            if session.grace_deadline_s is not None:
                due.append(session.grace_deadline_s)
            if session.requests:
                due.append(session.watermark_s)
        due += [session.retry_s for session in self._dirty if session.is_granted]
        return max(1, min(IDLE_WAIT_MS_MAX, int((min(due) - now_s) * 1000) + 1))

    # --- receiving -----------------------------------------------------------------------------------------

    def _read_subscriptions(self, now_s: float) -> int:
        grants = 0
        while True:
            try:
                frame = self._out.recv(zmq.DONTWAIT, copy=not self._with_users)
            except zmq.Again:
                return grants
            event, user = _bytes_and_user(frame)
            if event[:1] == b"\x01":
                grants += self._grant(event[1:], user)
            elif event[:1] == b"\x00":
                self.sessions.unsubscribed(event[1:], now_s)

    def _grant(self, topic: bytes, user: str) -> bool:
        session = self.sessions.subscribed(topic, user)
        if session is None:
            self.counters.refused_subscriptions += 1
            log.warning("subscription refused", extra={"topic_bytes": len(topic)})
            return False
        # Applies to the connection whose subscription was received last: this must come before the next recv.
        self._out.setsockopt(zmq.SUBSCRIBE, topic)
        self._publisher.granted(session)
        return True

    def _read_commands(self, now_s: float) -> int:
        handled = 0
        while True:
            try:
                frames = self._cmd.recv_multipart(zmq.DONTWAIT, copy=not self._with_users)
            except zmq.Again:
                return handled
            handled += 1
            self.counters.commands += 1
            self._handle_frames(frames, now_s)
            if handled % 64 == 0 and self._clock() - now_s > COMMANDS_SECONDS_MAX:
                return handled

    def _handle_frames(self, frames: list[Any], now_s: float) -> None:
        route, user = _bytes_and_user(frames[0])
        if self._with_users:
            user = _user(frames[-1])
        parts = [_bytes_and_user(frame)[0] for frame in frames[1:]] if self._with_users else frames[1:]
        try:
            command: Command = self._decoder.decode(parts)
        except ZmqEngineError as error:
            addressee = read_addressee(parts[1]) if len(parts) == 2 else read_addressee(b"")
            reply = self._commands.rejection(error, addressee.call, addressee.request)
            self._reply(route, *encode(reply))
            return
        self._reply(route, *encode(self._commands.handle(command, route, user, now_s)))

    def _reply(self, route: bytes, header: bytes, body: bytes) -> None:
        try:
            self._cmd.send_multipart([route, header, body], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # The front-end is gone or does not read; it repeats the command if it still wants the answer.
            log.debug("reply dropped", extra={"reason": str(error)})

    # --- time ----------------------------------------------------------------------------------------------

    def _keep_time(self, now_s: float) -> None:
        for request in self.scheduler.expired(now_s):
            self._end(request, "deadline", "deadline_ms passed before the last token")
        self._keep_draining(now_s)
        if now_s < self._housekeeping_s and self._has_work:
            return
        self._housekeeping_s = now_s + HOUSEKEEPING_S
        for session in list(self.sessions):
            self._keep_session(session, now_s)
        self._keep_memory(now_s)

    def _keep_session(self, session: Session, now_s: float) -> None:
        if now_s >= session.lease_deadline_s:
            log.warning("lease ran out", extra={"session": session.id, "client": session.client})
            self._end_session(session, "lease")
        elif session.grace_deadline_s is not None and now_s >= session.grace_deadline_s:
            log.warning("front-end vanished", extra={"session": session.id, "client": session.client})
            self._end_session(session, "abort")
        elif session.lagging and session.unsent_tokens > self._config.session_backlog_tokens_max:
            for request in _live(session):
                self._end(request, "slow_consumer", "the front-end fell behind by more than its budget")
        elif session.requests and now_s >= session.watermark_s:
            session.watermark_s = now_s + WATERMARK_S
            self._publisher.watermark(session)

    def _keep_draining(self, now_s: float) -> None:
        if self._board.drain_requests == 0:
            return
        if self._drain_deadline_s is None:
            log.info(
                "draining", extra={"running": len(self.scheduler.running), "queued": self.scheduler.queued}
            )
            self._board.state = "draining"
            self._commands.draining = True
            self._drain_deadline_s = now_s + self._config.drain_timeout_s
            for request in list(self.scheduler.waiting()):
                self._end(request, "shutdown", "the worker stopped before this request was started")
        if now_s >= self._drain_deadline_s or self._board.drain_requests > 1:
            for request in list(self.scheduler.running.values()):
                self._end(request, "shutdown", "the worker stopped before the last token")
        if not self._has_work and self._ack_deadline_s is None:
            self._ack_deadline_s = now_s + ACK_WAIT_S

    def _is_finished(self) -> bool:
        if self._board.drain_requests == 0 or self._ack_deadline_s is None:
            return False
        unread = any(session.requests for session in self.sessions)
        return not unread or self._clock() >= self._ack_deadline_s or self._board.drain_requests > 1

    def _keep_memory(self, now_s: float) -> None:
        limit = self._memory_limit_bytes
        if limit is None or now_s < self._memory_check_s:
            return
        self._memory_check_s = now_s + 1.0
        try:
            stats = self._engine.stats()
            over = stats.active_bytes + stats.cache_bytes - limit
            if over > 0:
                freed = self._engine.trim_prompt_cache(max(0, stats.prompt_cache_bytes - over))
                log.info("prompt cache trimmed", extra={"freed_bytes": freed, "over_bytes": over})
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)

    # --- the step ------------------------------------------------------------------------------------------

    def _step(self, report: PassReport, now_s: float) -> int:
        """Admit, make one step, settle; returns the nanoseconds spent in `next()`."""
        try:
            self._remove_rows()
            report.admitted = self._admit()
            if not self.scheduler.running:
                return 0
            started_ns = time.perf_counter_ns()
            result = self._engine.next()
            step_ns = time.perf_counter_ns() - started_ns
        except Exception as error:  # noqa: BLE001 - one failure becomes terminal answers, or the end of the process
            self._engine_failed(error, now_s)
            return 0
        report.stepped = True
        report.tokens = self._settle(result)
        return step_ns

    def _remove_rows(self) -> None:
        if self._leaving_rows:
            rows, self._leaving_rows = self._leaving_rows, []
            self._engine.remove(rows)

    def _admit(self) -> int:
        if self._recovery.is_active:
            joining = self._recovery.next_to_join()
            for request in joining:
                self.scheduler.renumber(request)
        else:
            joining = []
            while (head := self.scheduler.head()) is not None and self._has_memory_for(head):
                joining.append(self.scheduler.start_head())
        if joining:
            failures = self._engine.insert([request.row_request(request.row) for request in joining])
            for row, message in failures:
                self._fail_row(row, message)
        return len(joining)

    def _has_memory_for(self, request: LiveRequest) -> bool:
        if not self.scheduler.has_room_for(request):
            return False
        if self.scheduler.has_room_for(request, beside_bytes=self._config.prompt_cache_bytes):
            return True
        room = self.scheduler.kv_bytes_max - self.scheduler.running_bytes - request.projected_bytes
        self._engine.trim_prompt_cache(room)
        return True

    def _settle(self, result: StepResult) -> int:
        running = self.scheduler.running
        dirty = self._dirty
        for row, token, logprobs, finish in result.tokens:
            request = running.get(row)
            if request is None:
                continue
            session = request.session
            session.log_bytes += request.log.append(token, logprobs)
            session.dirty[request] = None
            dirty[session] = None
            if request.strikes:
                self._recovery.made_token(request)
            if finish is not None:
                self._end(request, finish, "", in_engine=False)
        for prefill in result.prefills:
            self._note_prefill(*prefill)
        for row, message in result.failures:
            self._fail_row(row, message)
        self.counters.tokens += len(result.tokens)
        return len(result.tokens)

    def _note_prefill(self, row: int, done: int, total: int, cached: int) -> None:
        request = self.scheduler.running.get(row)
        if request is None:
            return
        request.cached_tokens = cached
        if request.prefill_pass < 0:
            request.prefill_pass = self.counters.passes
            waited = request.prefill_pass - request.arrival_pass + 1
            self.counters.admission_wait_passes_max = max(self.counters.admission_wait_passes_max, waited)
        # A prompt that is read in one pass has no progress to tell.
        if done < total or request.progress_told:
            request.progress_told = True
            request.session.progress[request] = (done, total, cached)
            self._dirty[request.session] = None

    def _fail_row(self, row: int, message: str) -> None:
        request = self.scheduler.running.get(row)
        if request is not None:
            log.warning(
                "row failed", extra={"request": request.id, "session": request.session.id, "reason": message}
            )
            self._end(request, "error", message, in_engine=False)

    def _engine_failed(self, error: Exception, now_s: float) -> None:
        self.counters.engine_failures += 1
        batch = list(self.scheduler.running.values())
        log.error("engine failed", extra={"requests": [request.id for request in batch]}, exc_info=error)
        guilty = self._recovery.failed(batch, now_s)
        if self._recovery.has_failed_too_often:
            raise EngineBroken(
                f"{self._config.engine_failures_max + 1} engine failures in "
                f"{self._config.engine_failures_window_s:g} s, the last one: {error}"
            ) from error
        self._leaving_rows.clear()
        try:
            self._engine.reset()
        except Exception as second:
            raise EngineBroken(f"the engine could not be reset: {second}") from second
        for request in guilty:
            self._end(request, "error", f"generating this request failed: {error}", in_engine=False)

    # --- endings -------------------------------------------------------------------------------------------

    def _end(self, request: LiveRequest, finish: Finish, message: str, *, in_engine: bool = True) -> None:
        """Give a request its terminal answer, in whatever phase it is."""
        if request.phase == "running" and in_engine:
            self._leaving_rows.append(request.row)
        self.scheduler.leave(request)
        request.finish(End(finish, message, request.prompt_tokens, request.cached_tokens))
        request.session.dirty[request] = None
        request.session.progress.pop(request, None)
        self._dirty[request.session] = None
        self._ended += 1
        self.counters.count_end(finish)
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

    def _end_session(self, session: Session, finish: Finish) -> None:
        for request in _live(session):
            self._end(request, finish, "the session ended")
        self._publisher.publish(session)
        self._dirty.pop(session, None)
        self.sessions.remove(session)

    def fail_all(self, message: str) -> None:
        """Tell every session that the worker is about to exit. Their requests go on in the next epoch."""
        for session in self.sessions:
            self._publisher.publish(session)
            self._publisher.fatal(session, message)

    def _publish(self, now_s: float) -> None:
        for session in list(self._dirty):
            if session.lagging and now_s < session.retry_s:
                continue
            session.retry_s = now_s + LAG_RETRY_S
            if self._publisher.publish(session) and not session.dirty:
                del self._dirty[session]

    # --- measuring -----------------------------------------------------------------------------------------

    def _measure(
        self, report: PassReport, started_ns: int, received_ns: int, stepped_ns: int, step_ns: int
    ) -> None:
        done_ns = time.perf_counter_ns()
        whole_ns = done_ns - started_ns
        if report.stepped:
            self.times.add(whole_ns, whole_ns - step_ns)
        if whole_ns > self._config.slow_pass_ms * 1e6:
            self.counters.slow_passes += 1
            log.warning(
                "slow pass",
                extra={
                    "pass_ms": round(whole_ns / 1e6, 1),
                    "receive_ms": round((received_ns - started_ns) / 1e6, 1),
                    "next_ms": round(step_ns / 1e6, 1),
                    "admit_and_settle_ms": round((stepped_ns - received_ns - step_ns) / 1e6, 1),
                    "publish_ms": round((done_ns - stepped_ns) / 1e6, 1),
                    "rows": len(self.scheduler.running),
                    "requests": [request.id for request in self.scheduler.running.values()],
                },
            )

    def _write_board(self) -> None:
        try:
            stats = self._engine.stats()
        except Exception as error:
            log.error("engine statistics failed", exc_info=error)
            return
        self._board.pass_times = self.times
        self._board.numbers = {
            **self.counters.numbers(),
            "sessions": len(self.sessions),
            "requests_held": sum(len(session.requests) for session in self.sessions),
            "log_bytes": sum(session.log_bytes for session in self.sessions),
            "queued": self.scheduler.queued,
            "running": len(self.scheduler.running),
            "rows_decoding": stats.rows_decoding,
            "rows_prefilling": stats.rows_prefilling,
            "steps": stats.steps,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "kv_bytes": stats.kv_bytes,
            "kv_projected_bytes": self.scheduler.running_bytes,
            "kv_bytes_max": self.scheduler.kv_bytes_max,
            "prompt_cache_bytes": stats.prompt_cache_bytes,
            "prompt_cache_entries": stats.prompt_cache_entries,
            "prompt_cache_bytes_max": self._config.prompt_cache_bytes,
            "active_bytes": stats.active_bytes,
            "cache_bytes": stats.cache_bytes,
            "peak_bytes": stats.peak_bytes,
            "memory_limit_bytes": self._memory_limit_bytes or 0,
            "frames": self._publisher.frames,
            "lags": self._publisher.lags,
        }


def _live(session: Session) -> list[LiveRequest]:
    return [request for request in session.requests.values() if request.end is None]


def _bytes_and_user(frame: Any) -> tuple[bytes, str]:
    if isinstance(frame, bytes):
        return frame, ""
    return frame.bytes, _user(frame)


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
