"""A worker under the test's own hand: the real actor and real sockets, a fake engine, a fake clock, passes by call."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from zmqengine.config import WorkerConfig
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
from zmqengine.engine.fake.fake_vector_engine import FakeVectorEngine
from zmqengine.engine.interface import RowRequest
from zmqengine.protocol import codec, messages
from zmqengine.protocol.addresses import Endpoints
from zmqengine.protocol.messages import (
    Abort,
    Accepted,
    Embed,
    End,
    Granted,
    Hello,
    Insert,
    Limits,
    Message,
    Rejected,
    TokenFrame,
    Watermark,
    Welcome,
)
from zmqengine.worker.actor import Actor, PassReport
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.main import IMAGES_MAX, TEXTS_MAX
from zmqengine.worker.process.memory_pressure import Level
from zmqengine.worker.process.memory_share import MemoryShare
from zmqengine.worker.process.power import PowerAssertion
from zmqengine.worker.process.wakeup import Wakeup
from zmqengine.worker.telemetry.shared_status import SharedStatus
from zmqengine.worker.wire.sockets import Sockets

CLOSE_MS = 1_000
ARRIVAL_MS_MAX = 60_000
"""Far more than loopback needs: running into it is a hang."""


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Harness:
    """One actor on a fake engine. `close()` at the end."""

    def __init__(
        self,
        directory: Path,
        engine: FakeEngineConfig | FakeEngine | FakeVectorEngine | None = None,
        *,
        memory_limit_bytes: int = 1 << 40,
        compiler: Any = None,
        memory_share: MemoryShare | None = None,
        power: PowerAssertion | None = None,
        wired: Any = None,
        **options: Any,
    ) -> None:
        self.engine: Any = FakeEngine() if engine is None else engine
        if isinstance(engine, FakeEngineConfig):
            self.engine = FakeEngine(engine) if engine.generates else FakeVectorEngine(engine)
        self.config = WorkerConfig(bind=f"ipc://{directory}/ctl", engine="fake:", **options)
        self.sockets = Sockets(
            Endpoints(*(f"ipc://{directory}/{name}" for name in ("ctl", "cmd", "out"))),
            frame_bytes_max=self.config.frame_bytes_max,
        )
        self.clock = FakeClock()
        self.pressure: Level = "normal"
        self.asleep_s = 0.0
        self.shared_status = SharedStatus(epoch=os.urandom(8), wakeup=Wakeup())
        info = self.engine.info
        context_tokens = min(info.context_tokens, self.config.context_max or info.context_tokens)
        limits = Limits(
            frame_bytes_max=self.config.frame_bytes_max,
            prompt_tokens_max=context_tokens - 1,
            context_tokens_max=context_tokens,
            queued_max=self.config.queue_max,
            sessions_max=self.config.sessions_max,
            requests_per_session_max=self.config.requests_per_session_max,
            open_max_tokens=True,
            constraints=compiler is not None,
            texts_max=TEXTS_MAX if info.makes_vectors else 0,
            images_max=0 if info.vision is None else IMAGES_MAX,
            image_patches_max=info.image_patches_max,
            prefill_keep=info.prefill_keep,
        )
        context = WorkerContext(
            self.config,
            self.shared_status,
            limits,
            info,
            memory_limit_bytes,
            compiler=compiler,
            clock=self.clock,
            memory_share=memory_share,
            memory_pressure=lambda: self.pressure,
            power=power or PowerAssertion(None),
            asleep_s=lambda: self.asleep_s,
            release_buffers=self._release_buffers,
            report_adapters=self._report_adapters,
            wired=wired,
        )
        self.adapters: list[str] = []
        """Adapters that the supervisor knows."""
        self.released = 0
        """Calls that released buffers."""
        self.actor = Actor(context, self.engine, self.sockets)
        self.front_ends: list[FrontEnd] = []

    def front_end(self, *, live: bool = True, **options: Any) -> FrontEnd:
        """A front-end of raw sockets; `live` says hello, subscribes and waits for the grant."""
        front_end = FrontEnd(self, **options)
        self.front_ends.append(front_end)
        if live:
            front_end.say_hello()
            front_end.subscribe()
        return front_end

    def _report_adapters(self, adapters: list[str]) -> None:
        self.adapters = adapters

    def _release_buffers(self) -> None:
        self.released += 1

    def pass_(self, wait_ms: int = 0) -> PassReport:
        """One pass, by default one that waits for nothing; then what must hold after every pass."""
        report = self.actor.run_pass(wait_ms)
        self.check()
        return report

    def check(self) -> None:
        """The engine's rows are those that run by the scheduler, and memory is within their reservations."""
        scheduler = self.actor.scheduler
        assert self.engine.row_ids == set(scheduler.running)
        assert scheduler.memory.reserved_bytes == sum(
            row.reserved_bytes for row in scheduler.running.values()
        )
        memory = self.engine.memory()
        assert memory.kv <= scheduler.memory.reserved_bytes <= scheduler.memory.kv_bytes_max
        assert memory.active <= scheduler.memory.limit_bytes
        for request in self.actor.lifecycle.live():
            assert (request.phase == "running") == (request.row in scheduler.running), request.phase

    def pass_with_command(self) -> PassReport:
        """One pass, after something has arrived on cmd."""
        assert self.sockets.cmd.poll(ARRIVAL_MS_MAX), "no command arrived"
        report = self.pass_()
        assert report.commands > 0
        return report

    def read_commands(self, count: int) -> None:
        """Passes until `count` more commands have been read, and not one pass more."""
        before = self.actor.counters.commands
        while self.actor.counters.commands < before + count:
            self.pass_with_command()

    def passes(self, count: int) -> list[PassReport]:
        """So many passes."""
        return [self.pass_() for _ in range(count)]

    def run_until(self, done: Callable[[], object], *, passes_max: int = 5000, wait_ms: int = 20) -> int:
        """Passes until `done()`; returns how many. Fails when it does not come about.

        What is under way on a socket comes in time and not in passes: once there were many, they are made slowly, and
        the clock goes on to when a full socket is tried again: a thread of libzmq that gets no turn fills one.
        """
        until_s = time.monotonic() + ARRIVAL_MS_MAX / 1000
        for count in itertools.count():
            if done():
                return count
            in_time = time.monotonic() < until_s
            assert count < passes_max or in_time, "what was waited for did not come about"
            if count > passes_max // 2:
                time.sleep(0.0005)
                self.clock.now_s = max(self.clock.now_s, self.actor.outgoing.next_retry_s() or 0.0)
            self.pass_(0 if self.actor.scheduler.running else wait_ms)
        raise AssertionError

    def close(self) -> None:
        for front_end in self.front_ends:
            front_end.close()
        self.actor.close()
        # 0 is for sockets on which nothing waits.
        self.sockets.close(linger_ms=CLOSE_MS)
        self.shared_status.wakeup.close()


class FrontEnd:
    """Speaks the protocol by hand, so that it can also break it."""

    def __init__(
        self,
        harness: Harness,
        *,
        secret: bytes | None = None,
        receive_frames_max: int = 0,
        expects_gaps: bool = False,
    ) -> None:
        self.harness = harness
        self.expects_gaps = expects_gaps
        self.secret = secret or os.urandom(16)
        self.context: zmq.Context[Any] = zmq.Context()
        self.cmd = self._socket(zmq.DEALER)
        self.cmd.connect(harness.sockets.endpoints.cmd)
        self.out = self._socket(zmq.SUB)
        self.out.setsockopt(zmq.RCVHWM, receive_frames_max)
        self.welcome: Welcome | None = None
        self.tokens: dict[str, list[int]] = {}
        self.vectors: dict[str, list[bytes]] = {}
        self.ends: dict[str, list[End]] = {}
        self.replies: list[Message] = []
        self.outputs: list[Message] = []
        self._calls = itertools.count(1)
        self._reply_decoder = codec.command_reply_decoder()
        self._output_decoder = codec.output_decoder()

    def _socket(self, kind: int) -> Any:
        socket = self.context.socket(kind)
        socket.linger = 0
        return socket

    @property
    def epoch(self) -> bytes:
        return self.harness.shared_status.epoch

    def say_hello(self) -> Welcome:
        reply = self.call(Hello(next(self._calls), (1, 1), "test", self.secret))
        assert isinstance(reply, Welcome), reply
        self.welcome = reply
        return reply

    def subscribe(self, topic: str | None = None) -> None:
        """Subscribe to the session's topic and wait until it is granted."""
        assert self.welcome is not None
        self.out.subscribe(topic or self.welcome.topic)
        self.out.connect(self.harness.sockets.endpoints.out)
        self.harness.run_until(lambda: self.read() or any(isinstance(o, Granted) for o in self.outputs))

    def send(self, message: Message) -> None:
        self.cmd.send_multipart(codec.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self.cmd.send_multipart(list(frames))

    def call(self, message: Message) -> Message:
        """Send a command, run passes until its reply is there, return it."""
        self.send(message)
        return self.next_reply()

    def next_reply(self) -> Message:
        """The next reply; passes are run only to read commands, so nothing runs ahead meanwhile."""
        before = len(self.replies)
        poller = zmq.Poller()
        poller.register(self.cmd, zmq.POLLIN)
        # A hash that a thread has computed wakes the actor.
        sources = (self.harness.sockets.cmd, self.harness.shared_status.wakeup.fileno())
        for source in sources:
            poller.register(source, zmq.POLLIN)
        while True:
            self.read()
            if len(self.replies) > before:
                return self.replies[before]
            ready = dict(poller.poll(ARRIVAL_MS_MAX))
            assert ready, "no reply came"
            if any(source in ready for source in sources):
                self.harness.shared_status.wakeup.clear()
                self.harness.pass_()

    def insert(self, request: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> Message:
        return self.call(self.insert_message(request, prompt, **fields))

    def insert_message(self, request: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> Insert:
        fields = {"call": next(self._calls), "epoch": self.epoch, "max_tokens": 8, "seed": 1, **fields}
        return Insert(request=request, prompt=list(prompt), **fields)

    def accepted(self, request: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> Accepted:
        reply = self.insert(request, prompt, **fields)
        assert isinstance(reply, Accepted), reply
        return reply

    def rejected(self, request: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> Rejected:
        reply = self.insert(request, prompt, **fields)
        assert isinstance(reply, Rejected), reply
        return reply

    def embed(self, request: str, texts: Sequence[Sequence[int]], **fields: Any) -> Message:
        fields = {"call": next(self._calls), "epoch": self.epoch, **fields}
        return self.call(Embed(request=request, texts=[list(text) for text in texts], **fields))

    def abort(self, request: str) -> Message:
        return self.call(Abort(next(self._calls), request))

    def next_call(self) -> int:
        return next(self._calls)

    def read(self) -> None:
        """Take everything that has arrived."""
        while self.cmd.poll(0):
            self.replies.append(self._reply_decoder.decode(self.cmd.recv_multipart()))
        while self.out.poll(0):
            _, *frames = self.out.recv_multipart()
            output = self._output_decoder.decode(frames)
            self.outputs.append(output)
            if isinstance(output, TokenFrame):
                self._take(output)

    def _take(self, frame: TokenFrame) -> None:
        for row in frame.rows:
            have = self.tokens.setdefault(row.request, [])
            vectors = self.vectors.setdefault(row.request, [])
            index = len(have) + len(vectors)
            assert self.expects_gaps or row.first_index == index, f"gap or repetition in {row.request}"
            have.extend(row.tokens)
            vectors.extend(row.vectors or ())
            if row.end is not None:
                self.ends.setdefault(row.request, []).append(row.end)

    def wait_for_end(self, *requests: str) -> list[End]:
        """Run passes until these have ended; each has exactly one terminal answer."""
        self.harness.run_until(lambda: self.read() or all(request in self.ends for request in requests))
        for request in requests:
            assert len(self.ends[request]) == 1
        return [self.ends[request][0] for request in requests]

    def watermarks(self) -> list[Watermark]:
        self.read()
        return [output for output in self.outputs if isinstance(output, Watermark)]

    def close(self) -> None:
        self.context.destroy(linger=0)


def row_of(
    insert: Insert, *, eos: frozenset[int] = frozenset({0}), max_tokens: int | None = None
) -> RowRequest:
    """What the fake engine's `expected_tokens` wants to know of an insert; `max_tokens` where it names none."""
    return RowRequest(
        row=0,
        prompt=insert.prompt,
        max_tokens=max_tokens or insert.max_tokens or 1 << 20,
        emitted=[],
        seed=insert.seed or 0,
        stop_token_ids=frozenset(insert.stop_token_ids) | eos,
    )


__all__ = ["FakeClock", "FrontEnd", "Harness", "messages", "row_of"]
