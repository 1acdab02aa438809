"""The actor: the loop on the main thread, and the only code that uses the engine.

One pass: intake -> timers -> batch.step -> adapters.advance -> outgoing.flush. `docs/worker.md` shows it on a page.
"""

from __future__ import annotations

import logging
import time

import zmq

from zmqengine.engine.interface import Engine, VectorEngine
from zmqengine.tcp_probes import PROBE_S, vanished_s
from zmqengine.worker.adapter_calls import WorkerAdapters
from zmqengine.worker.batch import Batch, EngineBroken
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.intake.commands import CommandHandler
from zmqengine.worker.intake.inbox import Inbox
from zmqengine.worker.intake.listing import list_requests, list_sessions
from zmqengine.worker.intake.sessions import SessionTable
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.process.heap import Heap
from zmqengine.worker.process.watchdog import Watchdog
from zmqengine.worker.scheduler.batching_delay import LOOK_S, BatchingDelay
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.telemetry.counters import PassReport
from zmqengine.worker.telemetry.shared_status import PassTimes
from zmqengine.worker.timers import Timers
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.sockets import PROBES_MAX, Sockets

log = logging.getLogger("zmqengine.worker")

BOARD_S = 0.1
"""Seconds between two updates of the shared status while rows run."""
STILL_S = float(vanished_s(PROBES_MAX) - PROBE_S)
"""Seconds above which a pass counts as an interruption, where no lease is shorter: the process was stopped, the machine
slept, or the device hung. A shorter one costs no connection, and the next pass reads the commands of that time."""

__all__ = ["Actor", "EngineBroken", "PassReport"]


class Actor:
    """Serves sessions on two sockets with one engine. Every method runs on the thread that built it."""

    def __init__(
        self,
        context: WorkerContext,
        engine: Engine | VectorEngine,
        sockets: Sockets,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._context = context
        self._still_s = min(STILL_S, context.config.lease_ms / 1000)
        self._shared_status = context.shared_status
        self._engine = engine
        self._cmd = sockets.cmd
        self._watchdog = watchdog
        self.counters = context.counters
        self.times = PassTimes()
        self.outgoing = Outgoing(context, sockets.out)
        self.sessions = SessionTable(context, self.outgoing)
        self.scheduler = Scheduler(context, engine)
        disk = engine.disk if isinstance(engine, Engine) else None
        self._adapters = WorkerAdapters(context, engine, self.scheduler)
        self.lifecycle = Lifecycle(context, self.scheduler, self.outgoing, disk, self._adapters)
        self.batch = Batch(context, engine, self.scheduler, self.lifecycle, self.outgoing)
        self._prompt_disk = self.lifecycle.prompt_disk
        self._heap = Heap()
        self._timers = Timers(
            context,
            self.sessions,
            self.scheduler,
            self.lifecycle,
            self.batch,
            self.outgoing,
            sockets,
            self._heap,
        )
        self._inbox = Inbox(
            context, sockets, self.sessions, CommandHandler(context, self.sessions, self.lifecycle)
        )
        self._batching_delay = BatchingDelay()
        self._sessions_seen = 0
        self._board_s = 0.0
        self._asleep_s = context.asleep_s()
        self._poller = zmq.Poller()
        for source in (sockets.cmd, sockets.out, self._shared_status.wakeup):
            self._poller.register(source, zmq.POLLIN)
        # The warm-up's steps and tokens are no request's.
        self._warm_up = engine.stats()
        # A status request right after the state becomes ready must find every number.
        self._write_board()

    def run(self) -> None:
        """Serve until drained. Raises `EngineBroken` when the engine fails too often."""
        while not self._timers.is_drained:
            is_busy = self.batch.has_work or self._prompt_disk.has_work
            self.run_pass(wait_ms=0 if is_busy else self._timers.idle_wait_ms())
        self._prompt_disk.save_all(self._timers.drain_left_s, self._may_go_on)

    def run_pass(self, wait_ms: int = 0) -> PassReport:
        """Make one pass; without work, wait up to `wait_ms` for an event first."""
        asked_s = self._context.clock()
        if wait_ms > 0:
            self._wait(wait_ms)
        started_ns = time.perf_counter_ns()
        now_s = self._shared_status.pass_started_s = self.counters.latencies.now_s = self._context.clock()
        asleep_s, self._asleep_s = self._asleep_s, self._context.asleep_s()
        still_s = now_s - asked_s - wait_ms / 1000 + self._asleep_s - asleep_s
        if still_s > self._still_s:
            self._timers.stood_still(still_s, now_s)
        if self._watchdog is not None:
            self._watchdog.beat()
        report = PassReport()
        ended_before = self.counters.ends

        self._inbox.read(report, now_s)
        if not self.scheduler.running:
            self._await_more(report, now_s)
        self._timers.keep(now_s)
        received_ns = time.perf_counter_ns()
        step_ns = self.batch.step(report, now_s)
        self._adapters.advance(self.lifecycle.live)
        stepped_ns = time.perf_counter_ns()
        self.outgoing.flush(now_s)
        self._prompt_disk.save(step_ns / 1e9 if report.stepped else None)

        report.ended = self.counters.ends - ended_before
        if report.stepped and not self.scheduler.running:
            self._batching_delay.emptied(report.ended, self._context.clock())
        self.counters.passes += 1
        if now_s >= self._board_s or not self.batch.has_work:
            self._board_s = now_s + BOARD_S
            self._write_board()
            if len(self.sessions) < self._sessions_seen:
                self._heap.expect()
            self._sessions_seen = len(self.sessions)
            self._heap.keep(now_s)
        self._measure(report, started_ns, received_ns, stepped_ns, step_ns)
        ended_s = self._context.clock()
        if ended_s - now_s > self._still_s:
            self._timers.stood_still(ended_s - now_s, ended_s)
        return report

    def fail_all(self, message: str) -> None:
        """Tell every session that the worker is about to exit. Their requests continue in the next epoch."""
        self.outgoing.fatal(message)

    def close(self) -> None:
        """Stop the watchdog and running preparations. Idempotent."""
        self.lifecycle.close()
        if self._watchdog is not None:
            self._watchdog.close()

    def _may_go_on(self) -> bool:
        if self._watchdog is not None:
            self._watchdog.pause()
        return self._shared_status.drain_requests <= 1

    def _wait(self, wait_ms: int) -> None:
        if self._watchdog is not None:
            self._watchdog.pause()
        ready = self._poller.poll(wait_ms)
        self._shared_status.wakeup.clear()
        is_sequel = self._batching_delay.is_sequel(self.scheduler.rates.step_s, self._context.clock())
        if not is_sequel and any(source is self._cmd for source, _ in ready):
            # Requests that arrive together share a prefill step; otherwise the first would delay the others by a step.
            time.sleep(LOOK_S)

    def _await_more(self, report: PassReport, now_s: float) -> None:
        """Before a batch starts, read the requests that arrive together with the waiting ones."""
        order, rates = self.scheduler.order, self.scheduler.rates
        waiting = came = len(order)
        for _ in range(self._batching_delay.looks_max(rates.step_s) if waiting else 0):
            if not self._batching_delay.expects_more(waiting, came, now_s):
                break
            time.sleep(LOOK_S)
            report.commands += self._inbox.read_commands(now_s)
            came = len(order) - waiting
            waiting += came

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
        if whole_ns > self._context.config.slow_pass_ms * 1e6:
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
        self._shared_status.pass_times = self.times
        self._shared_status.histograms = self.counters.latencies.snapshot()
        self._shared_status.sessions = list_sessions(self.sessions, self.outgoing)
        self._shared_status.requests = list_requests(
            self.scheduler, self.lifecycle, self._shared_status.pass_started_s
        )
        self._shared_status.memory = self.scheduler.memory.parts(memory)
        self._shared_status.numbers = {
            **self.counters.numbers(),
            **self.scheduler.memory.numbers(memory),
            **self._prompt_disk.numbers(),
            **self.lifecycle.image_numbers(),
            **stats.images,
            "sessions": len(self.sessions),
            "requests_held": sum(len(session.requests) for session in self.sessions),
            "log_bytes": self.outgoing.all_held_bytes,
            "queued": self.lifecycle.waiting,
            "running": len(self.scheduler.running),
            "parked_now": self.lifecycle.parked,
            "rows_decoding": stats.rows_decoding,
            "rows_prefilling": stats.rows_prefilling,
            "steps": stats.steps - self._warm_up.steps,
            "prompt_tokens": stats.prompt_tokens - self._warm_up.prompt_tokens,
            "cached_tokens": stats.cached_tokens - self._warm_up.cached_tokens,
            "generated_tokens": stats.generated_tokens - self._warm_up.generated_tokens,
            "prompt_cache_entries": stats.prompt_cache_entries,
            **{f"prompt_cache_{name}": number for name, number in stats.prompt_cache.items()},
            "frames": self.outgoing.frames,
            "lags": self.outgoing.lags,
        }
