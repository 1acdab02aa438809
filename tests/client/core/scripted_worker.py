"""A worker and a network in memory, for tests of the I/O-free core: they lose, repeat and reorder on purpose."""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.codec import command_decoder, control_decoder, encode
from zmqengine.protocol.messages import (
    Abort,
    Accepted,
    Ack,
    Bye,
    Command,
    Describe,
    Description,
    Done,
    End,
    GetTokenizer,
    Granted,
    Hello,
    Image,
    Insert,
    Limits,
    Message,
    ModelCard,
    Ping,
    Progress,
    ProgressRow,
    Rejected,
    Replay,
    Resume,
    TokenFrame,
    TokenizerBundle,
    TokenRow,
    Watermark,
    WatermarkRow,
    Welcome,
    WorkerState,
)
from zmqengine_client.core.outbox import CloseWorkerSockets, MakePixels, OpenCommands, OpenOutput, Send
from zmqengine_client.core.session import ClientSession
from zmqengine_client.transport import CONTROL_QUEUE_MAX

VOCAB = 500
CONTEXT = 300
LIMITS = Limits(
    frame_bytes_max=8192,
    prompt_tokens_max=CONTEXT - 1,
    context_tokens_max=CONTEXT,
    queued_max=64,
    sessions_max=4,
    requests_per_session_max=64,
    images_max=3,
    image_patches_max=64,
)
MODEL = ModelCard(
    name="scripted",
    vocab_size=VOCAB,
    context_tokens=CONTEXT,
    eos_token_ids=[0],
    tokenizer_hash="t1",
    parameter_bytes=0,
)
CTL = "ipc:///tmp/none/ctl"


def token_at(prompt: list[int], seed: int, index: int) -> int:
    """The token at one output index: 0, the end token, comes about once in 60."""
    number = zlib.crc32(repr((prompt, seed, index)).encode())
    return 0 if number % 60 == 0 else 1 + number % (VOCAB - 1)


def expected_output(prompt: list[int], seed: int, max_tokens: int, stops: set[int]) -> list[int]:
    """What a request must get, whatever happens on the way."""
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in stops):
        output.append(token_at(prompt, seed, len(output)))
    return output


@dataclass
class Held:
    """A request in the worker."""

    insert: Insert
    tokens: list[int]
    sent: int
    end: End | None = None
    end_sent: bool = False


@dataclass
class HeldSession:
    """A session in the worker."""

    topic: bytes
    connection: int
    id: str = "s1"
    subscribed: bool = False
    frames: int = 0
    requests: dict[str, Held] = field(default_factory=dict)


class ScriptedWorker:
    """Speaks ZE1 as SPEC.md has it, one message at a time."""

    def __init__(self, *, state: WorkerState = "ready", model: ModelCard = MODEL, epoch: int = 1) -> None:
        self.epoch = epoch.to_bytes(8, "big")
        self.state: WorkerState = state
        self.model = model
        self.progress = Progress("reading")
        self.limits = LIMITS
        self.sessions: dict[bytes, HeldSession] = {}
        self.fenced: set[int] = set()
        self.refuse: list[tuple[type[Message], str]] = []
        self.retry_after_ms: dict[str | None, int | None] = {}
        self.received: list[Command] = []
        self.images: dict[bytes, bytes] = {}
        self.images_room = 8
        self._topics = 0

    def control(self, frames: list[bytes]) -> Message:
        """The answer on ctl."""
        request = control_decoder().decode(frames)
        if isinstance(request, Describe):
            ready = self.state in ("ready", "draining")
            return Description(
                call=request.call,
                protocol=(1, 1),
                version="0",
                name="scripted",
                pid=1,
                epoch=self.epoch,
                state=self.state,
                progress=self.progress,
                cmd="ipc:///tmp/none/cmd",
                out="ipc:///tmp/none/out",
                model=self.model if ready else None,
                limits=self.limits if ready else None,
                message="no such file" if self.state == "failed" else "",
            )
        if isinstance(request, GetTokenizer):
            return TokenizerBundle(request.call, "t1", b"{}", None, [0])
        return Done(request.call, self.epoch)

    def command(self, frames: list[bytes], connection: int) -> Message:
        """The answer on cmd."""
        command: Command = command_decoder(LIMITS.frame_bytes_max).decode(frames)
        self.received.append(command)
        for rule in self.refuse:
            if isinstance(command, rule[0]):
                self.refuse.remove(rule)
                return self._reject(command, rule[1])
        if isinstance(command, Hello):
            return self._hello(command, connection)
        if isinstance(command, Insert) and command.epoch != self.epoch:
            return self._reject(command, "stale_epoch")
        if connection in self.fenced:
            return self._reject(command, "fenced")
        session = next((s for s in self.sessions.values() if s.connection == connection), None)
        if session is None:
            return self._reject(command, "unknown_session")
        return self._in_session(command, session)

    def subscribe(self, topic: bytes) -> list[bytes] | None:
        """Grant a subscription."""
        for session in self.sessions.values():
            if session.topic == topic:
                session.subscribed = True
                return [topic, *encode(Granted(self.epoch, session.id))]
        return None

    def run_pass(self) -> list[list[bytes]]:
        """One token for every request, and the frames that tell of it."""
        frames = []
        for session in self.sessions.values():
            for held in session.requests.values():
                self._step(held)
            rows = [self._row(name, held) for name, held in session.requests.items() if not held.end_sent]
            rows = [row for row in rows if row.tokens or row.end is not None]
            if session.subscribed and rows:
                progress = [ProgressRow(row.request, 1, 1, 0) for row in rows if row.first_index == 0]
                frame = TokenFrame(self.epoch, session.frames, rows, progress)
                frames.append([session.topic, *encode(frame)])
                session.frames += 1
                for row in rows:
                    held = session.requests[row.request]
                    held.sent, held.end_sent = len(held.tokens), row.end is not None
        return frames

    def watermarks(self) -> list[list[bytes]]:
        """How far every request is."""
        return [
            [
                session.topic,
                *encode(
                    Watermark(
                        self.epoch,
                        session.frames,
                        [
                            WatermarkRow(name, len(held.tokens), held.end is not None)
                            for name, held in session.requests.items()
                        ],
                    )
                ),
            ]
            for session in self.sessions.values()
            if session.subscribed and session.requests
        ]

    def requests(self) -> dict[str, Held]:
        """Every request of every session."""
        return {name: held for session in self.sessions.values() for name, held in session.requests.items()}

    def _hello(self, hello: Hello, connection: int) -> Message:
        self._topics += 1
        topic = b"s/%032x/" % (self._topics + int.from_bytes(self.epoch, "big") * 1000)
        session = self.sessions.get(hello.session_secret)
        if session is None:
            session = self.sessions[hello.session_secret] = HeldSession(topic, connection)
        elif session.connection != connection:
            self.fenced.add(session.connection)
            session.connection, session.topic, session.subscribed = connection, topic, False
        rows = [
            WatermarkRow(name, len(held.tokens), held.end is not None)
            for name, held in session.requests.items()
        ]
        return Welcome(
            hello.call, 1, self.epoch, session.id, session.topic.decode(), self.limits, 30_000, rows
        )

    def _in_session(self, command: Command, session: HeldSession) -> Message:
        if isinstance(command, Insert):
            return self._insert(command, session)
        if isinstance(command, Image):
            self.images[command.hash] = bytes(command.pixels)
            while len(self.images) > self.images_room:
                del self.images[next(iter(self.images))]
            return Done(command.call, self.epoch)
        if isinstance(command, Abort):
            held = session.requests.get(command.request)
            if held is not None and held.end is None:
                held.end = End("abort")
        elif isinstance(command, Resume):
            held = session.requests.get(command.request)
            if held is None:
                return self._reject(command, "unknown_request")
            stop = command.from_index + 5
            more = stop < len(held.tokens)
            row = TokenRow(
                command.request,
                command.from_index,
                held.tokens[command.from_index : stop],
                None,
                None if more else held.end,
            )
            return Replay(command.call, self.epoch, row, more)
        elif isinstance(command, Ack):
            for name in command.requests:
                held = session.requests.get(name)
                if held is not None and held.end is not None:
                    del session.requests[name]
        elif isinstance(command, Bye):
            self.sessions = {key: value for key, value in self.sessions.items() if value is not session}
        else:
            assert isinstance(command, Ping)
        return Done(command.call, self.epoch)

    def _insert(self, insert: Insert, session: HeldSession) -> Message:
        assert session.subscribed, "inserted before the subscription was granted"
        held = session.requests.get(insert.request)
        if held is None:
            wanted = [image.hash for image in insert.images if image.hash not in self.images]
            if wanted:
                return Rejected(
                    insert.call, self.epoch, "image_wanted", "scripted", insert.request, wanted=wanted
                )
            assert insert.seed is not None
            made = expected_output(insert.prompt, insert.seed, insert.max_tokens, self._stops(insert))  # type: ignore[arg-type]
            assert insert.emitted == made[: len(insert.emitted)], "emitted is not what was generated"
            assert len(insert.emitted) < len(made), "inserted again although it was complete"
            held = Held(insert, list(insert.emitted), len(insert.emitted))
            session.requests[insert.request] = held
        elif repr(_contents(held.insert)) != repr(_contents(insert)):
            return self._reject(insert, "conflict")
        assert held.insert.seed is not None
        state: Any = "ended" if held.end is not None else "running"
        return Accepted(insert.call, self.epoch, insert.request, len(held.tokens), held.insert.seed, state)

    def _step(self, held: Held) -> None:
        if held.end is not None:
            return
        assert held.insert.seed is not None
        held.tokens.append(token_at(held.insert.prompt, held.insert.seed, len(held.tokens)))
        if held.tokens[-1] in self._stops(held.insert):
            held.end = End("stop", prompt_tokens=len(held.insert.prompt))
        elif len(held.tokens) >= held.insert.max_tokens:  # type: ignore[operator]
            held.end = End("length", prompt_tokens=len(held.insert.prompt))

    def _stops(self, insert: Insert) -> set[int]:
        return set(insert.stop_token_ids) | (set() if insert.ignore_eos else {0})

    def _row(self, name: str, held: Held) -> TokenRow:
        return TokenRow(name, held.sent, held.tokens[held.sent :], None, held.end)

    def _reject(self, command: Command, code: str) -> Rejected:
        request = getattr(command, "request", None)
        hint = self.retry_after_ms.get(request, 20)
        return Rejected(command.call, self.epoch, code, f"scripted {code}", request, hint)


def _contents(insert: Insert) -> tuple[object, ...]:
    return tuple(getattr(insert, name) for name in Insert.__struct_fields__ if name != "call")


class Network:
    """One session and one worker, with queues between them that a test moves along. Time is `now`."""

    def __init__(
        self,
        session: ClientSession,
        worker: ScriptedWorker | None,
        *,
        seed: int = 0,
        drop: float = 0.0,
        repeat: float = 0.0,
    ) -> None:
        self.session = session
        self.worker = worker
        self.now = 100.0
        self.random = random.Random(seed)
        self.drop = drop
        self.repeat = repeat
        self.connection = 0
        self.cmd_open = False
        self.topic: bytes | None = None
        self.up: dict[str, deque[list[bytes]]] = {"ctl": deque(), "cmd": deque()}
        self.down: dict[str, deque[list[bytes]]] = {"ctl": deque(), "cmd": deque(), "out": deque()}
        self.dropped = 0
        self.making: deque[MakePixels] = deque()
        self._pending_subscription: bytes | None = None

    # --- what tests do -------------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out the session's actions."""
        for action in self.session.outbox.take_actions():
            if isinstance(action, Send):
                # Without a worker little is kept for the next one, as in the real socket.
                has_room = self.worker is not None or len(self.up["ctl"]) < CONTROL_QUEUE_MAX
                if has_room if action.channel == "ctl" else self.cmd_open:
                    self.up[action.channel].append([bytes(frame) for frame in action.frames])
            elif isinstance(action, OpenCommands):
                self.connection += 1
                self.cmd_open = True
            elif isinstance(action, OpenOutput):
                self.topic = self._pending_subscription = action.topic
            elif isinstance(action, MakePixels):
                self.making.append(action)
            else:
                assert isinstance(action, CloseWorkerSockets)
                self._cut()

    def deliver(self, channel: str) -> None:
        """Hand one message to the session."""
        if self.down[channel]:
            frames = self.down[channel].popleft()
            self.session.receive(channel, frames, self.now)  # type: ignore[arg-type]
            self.carry_out()

    def serve(self, channel: str) -> None:
        """Let the worker answer one message."""
        if self.worker is None or not self.up[channel]:
            return
        frames = self.up[channel].popleft()
        if channel == "ctl":
            self.session.connected("ctl")
            reply = self.worker.control(frames)
        else:
            try:
                reply = self.worker.command(frames, self.connection)
            except ZmqEngineError as error:
                raise AssertionError(f"the client sent what cannot be decoded: {error}") from error
        self.down[channel].append(list(encode(reply)))

    def make_pixels(self) -> None:
        """Make the pixels that the session asked for first."""
        if self.making:
            made = self.making.popleft()
            self.session.pixels_made(made, [image.make() for image in made.images], None, self.now)
            self.carry_out()

    def grant(self) -> None:
        """Let the worker see the subscription."""
        if self.worker is not None and self._pending_subscription is not None:
            granted = self.worker.subscribe(self._pending_subscription)
            self._pending_subscription = None
            if granted is not None:
                self.down["out"].append(granted)

    def run_pass(self) -> None:
        """Let the worker make tokens; frames get lost and repeated on their way."""
        if self.worker is None:
            return
        frames = self.worker.run_pass()
        if self.random.random() < 0.2:
            frames += self.worker.watermarks()
        for message in frames:
            if message[0] != self.topic or self.random.random() < self.drop:
                self.dropped += 1
                continue
            self.down["out"].append(message)
            if self.random.random() < self.repeat:
                self.down["out"].append(message)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.session.advance(self.now)
        self.carry_out()
        assert self.session.next_deadline() > self.now, "whoever drives it would spin"

    def kill(self, *, notice: bool = True) -> None:
        """The worker dies; with `notice` the connections are seen to break, in the transport's order."""
        self.worker = None
        for queue in (*self.up.values(), *self.down.values()):
            queue.clear()
        self._pending_subscription = None
        if notice:
            cmd_open = self.cmd_open
            self.session.disconnected("ctl", self.now)
            if cmd_open:
                self.session.disconnected("cmd", self.now)
            self.carry_out()

    def step(self) -> None:
        """One thing happens, chosen at random: so replies and output overtake each other."""
        self.carry_out()
        choice = self.random.randrange(10)
        if choice == 0:
            self.serve("ctl")
        elif choice == 1:
            self.deliver("ctl")
        elif choice in (2, 3):
            self.serve("cmd")
        elif choice in (4, 5):
            self.deliver("cmd")
        elif choice == 6:
            self.grant()
            self.make_pixels()
        elif choice == 7:
            self.run_pass()
        elif choice == 8:
            self.deliver("out")
        else:
            self.wait(self.random.choice((0.001, 0.01, 0.2)))

    def settle(self, steps: int = 60) -> None:
        """Everything that is under way arrives, in order; no token is made and no time passes."""
        for _ in range(steps):
            self.wait(0.0)
            for channel in ("ctl", "cmd"):
                self.serve(channel)
                self.deliver(channel)
            self.grant()
            self.make_pixels()
            self.deliver("out")

    def _cut(self) -> None:
        self.cmd_open = False
        self.topic = self._pending_subscription = None
        self.up["cmd"].clear()
        self.down["cmd"].clear()
        self.down["out"].clear()
