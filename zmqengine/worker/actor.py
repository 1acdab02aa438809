"""The actor: the loop on the main thread, and the only code that uses the engine.

One pass: grants -> commands -> deadlines and leases -> admit -> one `next()` -> settle -> publish.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from zmqengine.config import WorkerConfig
from zmqengine.engine.interface import Engine
from zmqengine.protocol.messages import Limits
from zmqengine.worker.board import Board, PassTimes
from zmqengine.worker.commands import CommandHandler
from zmqengine.worker.counters import Counters, PassReport
from zmqengine.worker.endings import Endings
from zmqengine.worker.inbox import Inbox
from zmqengine.worker.listing import list_requests, list_sessions
from zmqengine.worker.metrics import memory_parts
from zmqengine.worker.publisher import Publisher
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import SessionTable
from zmqengine.worker.stepper import EngineBroken, Stepper
from zmqengine.worker.timekeeper import Timekeeper
from zmqengine.worker.watchdog import Watchdog

log = logging.getLogger("zmqengine.worker")

BOARD_S = 0.1
GATHER_S = 0.0003
"""After an idle worker hears the first command, for those that were sent with it."""

__all__ = ["Actor", "EngineBroken", "PassReport"]


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
        self._board = board
        self._watchdog = watchdog
        self._clock = clock
        self._memory_limit_bytes = memory_limit_bytes
        self.counters = Counters()
        self.times = PassTimes()
        self.sessions = SessionTable(
            sessions_max=config.sessions_max, lease_s=config.lease_ms / 1000, grace_s=config.grace_ms / 1000
        )
        self.scheduler = Scheduler(rows_max=engine.rows_max, kv_bytes_max=kv_bytes_max)
        self._publisher = Publisher(out, board.epoch, drop_share=config.fault_drop_frames)
        self._endings = Endings(self.scheduler, self.sessions, self._publisher, self.counters)
        commands = CommandHandler(
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
            endings=self._endings,
        )
        self._inbox = Inbox(
            cmd,
            out,
            commands,
            self.sessions,
            self._publisher,
            self.counters,
            frame_bytes_max=limits.frame_bytes_max,
            with_users=config.uses_curve,
            clock=clock,
        )
        self._timekeeper = Timekeeper(
            config, board, self.scheduler, self.sessions, commands, self._publisher, self._endings, clock
        )
        self._stepper = Stepper(
            config,
            engine,
            self.scheduler,
            self._endings,
            self.counters,
            memory_limit_bytes=memory_limit_bytes,
        )
        self._board_s = 0.0
        self._poller = zmq.Poller()
        for source in (cmd, out, board.wakeup):
            self._poller.register(source, zmq.POLLIN)
        # Whoever asks for the status as soon as the state is ready finds every number there.
        self._write_board()

    def run(self) -> None:
        """Serve until drained. Raises `EngineBroken` when the engine fails too often."""
        while not self._timekeeper.is_drained:
            self.run_pass(wait_ms=0 if self.scheduler.has_work else self._timekeeper.idle_wait_ms())

    def run_pass(self, wait_ms: int = 0) -> PassReport:
        """One pass; with nothing to do, wait up to `wait_ms` for something first."""
        if wait_ms > 0:
            self._wait(wait_ms)
        started_ns = time.perf_counter_ns()
        now_s = self._board.pass_started_s = self.counters.latencies.now_s = self._clock()
        if self._watchdog is not None:
            self._watchdog.beat(now_s)
        report = PassReport()
        ended_before = self._endings.count
        report.grants = self._inbox.read_subscriptions(now_s)
        report.commands = self._inbox.read_commands(now_s)
        self._timekeeper.keep(now_s)
        received_ns = time.perf_counter_ns()
        step_ns = self._stepper.step(report, now_s)
        stepped_ns = time.perf_counter_ns()
        self._endings.publish(now_s)
        report.ended = self._endings.count - ended_before
        self.counters.passes += 1
        if now_s >= self._board_s or not self.scheduler.has_work:
            self._board_s = now_s + BOARD_S
            self._write_board()
        self._measure(report, started_ns, received_ns, stepped_ns, step_ns)
        return report

    def fail_all(self, message: str) -> None:
        """Tell every session that the worker is about to exit. Their requests go on in the next epoch."""
        for session in self.sessions:
            self._publisher.publish(session)
            self._publisher.fatal(session, message)

    def close(self) -> None:
        """Stop the watchdog. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _wait(self, wait_ms: int) -> None:
        if self._watchdog is not None:
            self._watchdog.pause()
        ready = self._poller.poll(wait_ms)
        self._board.wakeup.clear()
        if any(source is self._cmd for source, _ in ready):
            # Requests come in bunches. Those of one moment share a prefill; the first alone would hold up the rest.
            time.sleep(GATHER_S)

    def _measure(
        self, report: PassReport, started_ns: int, received_ns: int, stepped_ns: int, step_ns: int
    ) -> None:
        done_ns = time.perf_counter_ns()
        whole_ns = done_ns - started_ns
        receive_ns = received_ns - started_ns
        admit_settle_ns = stepped_ns - received_ns - step_ns
        publish_ns = done_ns - stepped_ns
        if report.stepped:
            outside_ns = whole_ns - step_ns
            self.counters.latencies.step_s.observe(step_ns / 1e9)
            self.times.add(whole_ns, outside_ns, receive_ns, step_ns, admit_settle_ns, publish_ns)
        if whole_ns > self._config.slow_pass_ms * 1e6:
            self.counters.slow_passes += 1
            log.warning(
                "slow pass",
                extra={
                    "pass_ms": round(whole_ns / 1e6, 1),
                    "receive_ms": round(receive_ns / 1e6, 1),
                    "next_ms": round(step_ns / 1e6, 1),
                    "admit_settle_ms": round(admit_settle_ns / 1e6, 1),
                    "publish_ms": round(publish_ns / 1e6, 1),
                    "rows": len(self.scheduler.running),
                    "requests": [request.id for request in self.scheduler.running.values()],
                },
            )

    def _write_board(self) -> None:
        try:
            stats, memory = self._engine.stats(), self._engine.memory()
        except Exception as error:
            log.error("engine statistics failed", exc_info=error)
            return
        self._board.pass_times = self.times
        self._board.histograms = self.counters.latencies.snapshot()
        self._board.sessions = list_sessions(self.sessions)
        self._board.requests = list_requests(self.scheduler, self._board.pass_started_s)
        self._board.memory = memory_parts(memory, self._memory_limit_bytes or 0)
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
            "kv_bytes": memory.kv,
            "kv_projected_bytes": self.scheduler.running_bytes,
            "kv_bytes_max": self.scheduler.kv_bytes_max,
            "prompt_cache_bytes": memory.prompt_cache,
            "prompt_cache_entries": stats.prompt_cache_entries,
            "prompt_cache_bytes_max": self._config.prompt_cache_bytes,
            "active_bytes": memory.active,
            "cache_bytes": memory.buffers,
            "peak_bytes": memory.peak,
            "memory_limit_bytes": self._memory_limit_bytes or 0,
            "frames": self._publisher.frames,
            "lags": self._publisher.lags,
        }
