"""One worker process from start to end: bind, answer, load, warm up, serve, drain."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from zmqengine.config import WorkerConfig
from zmqengine.engine.adapter_files import read_files
from zmqengine.errors import ConfigError, ModelLoadError
from zmqengine.protocol.addresses import DEFAULT_NAME
from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Limits, ModelCard, Progress
from zmqengine.worker.actor import Actor, EngineBroken
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.intake.control_thread import ControlThread
from zmqengine.worker.open_engine import Opened, after_a_hang, measure_disk, open_engine, warm_up
from zmqengine.worker.process import logs
from zmqengine.worker.process.heap import set_apart, share_one_arena
from zmqengine.worker.process.niceness import nice_facts
from zmqengine.worker.process.parent import (
    EXIT_FAILED,
    EXIT_HOPELESS,
    EXIT_OK,
    ParentProcess,
    SupervisorLink,
    restarts_so_far,
    watch_supervisor,
)
from zmqengine.worker.process.power import asleep_s, power_assertion
from zmqengine.worker.process.wakeup import Wakeup
from zmqengine.worker.process.watchdog import Watchdog
from zmqengine.worker.telemetry.shared_status import SharedStatus
from zmqengine.worker.wire.auth import key_check, open_guard
from zmqengine.worker.wire.connection_limiter import doors_of
from zmqengine.worker.wire.descriptors import bound_connections
from zmqengine.worker.wire.sockets import Sockets, new_context

log = logging.getLogger("zmqengine.worker")

FLUSH_MS = 2_000
"""Maximum milliseconds at the end for libzmq to send what it has queued."""
TEXTS_MAX = 256
"""Maximum texts of one embed. Bounds the texts in the queue, and keeps an answer at a few MB."""
IMAGES_MAX = 64
"""Maximum images of one insert: an agent sends a screenshot each turn, and 64 of them fill most contexts."""
MESSAGE_BYTES = 65_536 + 4 * CONSTRAINT_CHARS_MAX
"""Bytes of a frame for everything except tokens and pixels; a character of a constraint takes up to four."""
TEXT_TOKENS = 512
"""Usual maximum length of a text to embed: encoders trained on longer texts are rare."""
FINDING = "finding the model"
TELL_S = 5.0
"""How often a start that takes long says at level info what it does; at level debug it tells each stage."""


class _StoppedEarly(BaseException):
    """A stop signal arrived before the worker was ready. A BaseException, so that no handler swallows it."""


def serve(config: WorkerConfig) -> int:
    """Run a worker on this process's main thread until it is drained; returns the exit code of `parent`."""
    # Before the first thread.
    share_one_arena()
    logs.set_up(config.log_level, config.log_format)
    wakeup = Wakeup()
    shared_status = SharedStatus(epoch=os.urandom(8), wakeup=wakeup, restarts=restarts_so_far())
    try:
        with _stop_signals(shared_status), Watchdog(config.pass_timeout_s) as watchdog:
            return Worker(config, shared_status, watchdog).run()
    except (ConfigError, ModelLoadError) as error:
        print(f"zmqengine worker: {error}", file=sys.stderr)
        return EXIT_HOPELESS
    except _StoppedEarly:
        return EXIT_OK


class Worker:
    """One life of a worker; `run` binds, loads, serves and cleans up on the calling thread.

    A `watchdog` takes the process's one timer and SIGALRM: a worker in a thread of another program has none.
    """

    def __init__(
        self, config: WorkerConfig, shared_status: SharedStatus, watchdog: Watchdog | None = None
    ) -> None:
        self._config = config
        self._shared_status = shared_status
        self._supervisor: SupervisorLink | None = watch_supervisor(_stop_this_process)
        self._parent = ParentProcess(_stop_this_process) if config.die_with_parent else None
        self._watchdog = watchdog
        self._told_s = time.monotonic()

    def run(self) -> int:
        context = new_context()
        guard = open_guard(self._config, context)
        bounds = bound_connections(self._config.sessions_max)
        sockets = Sockets(
            self._config.endpoints,
            frame_bytes_max=self._config.frame_bytes_max,
            context=context,
            guard=guard,
            backlog=bounds.backlog,
        )
        control = ControlThread(
            sockets.ctl,
            self._shared_status,
            name=self._config.name,
            endpoints=sockets.endpoints,
            guard=guard,
            keep_ctl=sockets.keep_ctl,
        )
        doors = doors_of(sockets.monitors, sockets.files, bounds.connections_max)
        for door in doors:
            control.watch(door)
        if self._supervisor is not None:
            self._supervisor.report(endpoints=sockets.endpoints)
            control.watch(self._supervisor)
        elif self._parent is not None:
            control.watch(self._parent)
        log.info("listening", extra={"address": sockets.endpoints.ctl})
        log.debug("epoch", extra={"epoch": self._shared_status.epoch.hex()})
        control.start()
        try:
            return self._load_and_serve(sockets)
        except BaseException as error:
            self._shared_status.message = str(error)
            self._shared_status.state = "failed"
            raise
        finally:
            if self._watchdog is not None:
                self._watchdog.close()
            control.stop()
            for door in doors:
                door.open()
            sockets.close(linger_ms=FLUSH_MS)

    def _load_and_serve(self, sockets: Sockets) -> int:
        log.info("loading", extra={"model": self._config.model})
        self._told_s = time.monotonic()
        # Importing MLX and mlx-lm is most of the wait for a small model.
        self._report_progress("starting the engine", None)
        # A restarted worker had a device before.
        probe = self._shared_status.restarts == 0
        if not probe:
            self._config = without_unreadable(self._config)
        try:
            opened = open_engine(
                self._config, self._report_progress, self._shared_status.wakeup.wake, probe=probe
            )
        except ModelLoadError as error:
            raise after_a_hang(error, self._shared_status.restarts) from error
        try:
            self._shared_status.state = "warming"
            self._report_progress("warming up", None)
            warm_up(opened.engine)
            measure_disk(opened.engine)
            actor = self._build_actor(opened, sockets)
            return self._serve(actor)
        finally:
            opened.close()

    def _build_actor(self, opened: Opened, sockets: Sockets) -> Actor:
        info = opened.engine.info
        context_tokens = min(info.context_tokens, self._config.context_max or info.context_tokens)
        needed = frame_bound(context_tokens, info.makes_vectors)
        patches_max = 0
        if info.vision is not None:
            room = (self._config.frame_bytes_max - MESSAGE_BYTES) // info.vision.patch_bytes
            patches_max = min(info.image_patches_max, info.vision.patches_max, room)
            needed = max(needed, MESSAGE_BYTES + patches_max * info.vision.patch_bytes)
        limits = Limits(
            frame_bytes_max=min(self._config.frame_bytes_max, needed),
            prompt_tokens_max=context_tokens - 1,
            context_tokens_max=context_tokens,
            queued_max=self._config.queue_max,
            sessions_max=self._config.sessions_max,
            requests_per_session_max=self._config.requests_per_session_max,
            open_max_tokens=True,
            constraints=opened.compiler is not None,
            thinking_max=info.generates,
            cache_scope=self._config.cache_scope,
            cache_salt=True,
            speculation=True,
            prediction_tokens_max=context_tokens,
            forced=info.generates,
            texts_max=TEXTS_MAX if info.makes_vectors else 0,
            images_max=0 if info.vision is None else IMAGES_MAX,
            image_patches_max=patches_max,
            prefill_keep=info.prefill_keep,
        )
        self._shared_status.limits = limits
        self._shared_status.tokenizer = opened.tokenizer
        self._shared_status.facts = {**opened.facts, **nice_facts(), "model": self._config.model}
        self._shared_status.model = ModelCard(
            name=info.name,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_token_ids=sorted(info.eos_token_ids),
            tokenizer_hash=opened.tokenizer.hash,
            parameter_bytes=info.parameter_bytes,
            generates=info.generates,
            dimensions=info.dimensions,
            labels=info.labels,
            adapters=list(info.adapters),
        )
        context = WorkerContext(
            self._config,
            self._shared_status,
            limits,
            info,
            opened.memory_limit_bytes,
            memory_share=opened.memory_share,
            memory_pressure=opened.memory_pressure,
            release_buffers=opened.release_buffers,
            wired=opened.wired,
            power=power_assertion(wanted=self._config.keep_awake),
            asleep_s=asleep_s,
            compiler=opened.compiler,
            report_adapters=self._report_adapters,
            tokenizer_json=opened.tokenizer.tokenizer_json,
            is_authorized=key_check(self._config),
        )
        return Actor(context, opened.engine, sockets, self._watchdog)

    def _serve(self, actor: Actor) -> int:
        if threading.current_thread() is threading.main_thread():
            # In a thread, as in tests, most of the process belongs to another program.
            set_apart()
        self._expect_within(0)
        self._shared_status.progress = Progress("ready", 1.0)
        self._shared_status.state = "ready"
        if self._supervisor is not None:
            self._supervisor.report(ready=True)
        card = self._shared_status.model
        assert card is not None
        facts = {"model": card.name, "context_tokens": card.context_tokens}
        device = self._shared_status.facts.get("device")
        log.info("ready", extra=facts | ({"device": device} if device else {}))
        log.debug("engine", extra={**self._shared_status.facts})
        if sys.stderr.isatty() and card.generates:
            name = "" if self._config.name == DEFAULT_NAME else f" --worker {self._config.name}"
            log.info("try `zmqengine chat%s`, or `zmqengine http%s` for other programs", name, name)
        try:
            actor.run()
        except EngineBroken as error:
            log.critical("giving up: %s", error)
            actor.fail_all(str(error))
            return EXIT_FAILED
        finally:
            actor.close()
        log.info("drained")
        return EXIT_OK

    def _report_adapters(self, adapters: list[str]) -> None:
        if self._supervisor is not None:
            self._supervisor.report(adapters=adapters)

    def _report_progress(self, stage: str, fraction: float | None) -> None:
        # Finding a model may include a download of hours, which has time-outs of its own.
        self._expect_within(0 if stage == FINDING else self._config.load_timeout_s)
        self._shared_status.progress = Progress(stage, fraction)
        now_s = time.monotonic()
        told = now_s - self._told_s >= TELL_S
        if told:
            self._told_s = now_s
        done = "" if fraction is None else f", {fraction:.0%}"
        log.log(logging.INFO if told else logging.DEBUG, "%s%s", stage, done)

    def _expect_within(self, timeout_s: float) -> None:
        if self._watchdog is not None:
            self._watchdog.expect_within(timeout_s)


def without_unreadable(config: WorkerConfig) -> WorkerConfig:
    """The options without adapters whose files are gone: a worker that is started again goes on without them."""
    kept = []
    for name, directory in config.adapters.items():
        try:
            read_files(name, directory)
            kept.append(f"{name}={directory}")
        except ModelLoadError as error:
            log.error("starting without an adapter", extra={"reason": error.message})
    return replace(config, adapter=tuple(kept))


def frame_bound(context_tokens: int, makes_vectors: bool = False) -> int:
    """Maximum bytes of a frame: enough for any insert that fits the context; longer ones are refused without decoding.

    A token id takes at most 5 bytes, in `prompt`, `emitted`, `forced` or `prediction`. An embed may have as many texts
    of the usual length as its limit allows.
    """
    tokens = 3 * context_tokens
    return MESSAGE_BYTES + 5 * (max(tokens, TEXTS_MAX * TEXT_TOKENS) if makes_vectors else tokens)


def _stop_this_process() -> None:
    """Send SIGTERM to this process: it interrupts the main thread, loading included."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _stop_signals(shared_status: SharedStatus) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP drain; before the worker is ready they end it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        shared_status.ask_to_drain()
        if shared_status.state in ("loading", "warming"):
            raise _StoppedEarly

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    earlier = {number: signal.signal(number, stop) for number in numbers}
    # Wakes the actor even if another thread receives the signal, so that an idle actor drains at once.
    earlier_fd = signal.set_wakeup_fd(shared_status.wakeup.signal_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        shared_status.wakeup.close()
