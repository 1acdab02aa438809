"""The connection to a worker: describing -> hello -> subscribing -> live, and back to describing when it is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from zmqengine.protocol.addresses import as_seen_from, is_absent
from zmqengine.protocol.messages import (
    PROTOCOL_VERSION,
    Description,
    Granted,
    Hello,
    Limits,
    ModelCard,
    WatermarkRow,
    Welcome,
)
from zmqengine_client.core.calls import CallTable
from zmqengine_client.core.outbox import ClientEvent, CloseWorkerSockets, EventKind, OpenCommands, OpenOutput
from zmqengine_client.core.phases import CONNECTION, ConnectionEvent, Phase, follow

CONNECT_S = 10.0
"""Time for a worker's first sign of life; a busy machine takes seconds to start one."""
STEP_S = 2.0
"""Time-out of welcome and of granted, after which a new connection is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Identity and timeouts of a client; `Client` explains the fields.

    With a `model` the address is that of a launcher; an empty one is the only model that it has loaded. `is_absent`:
    whether nothing can answer at an address.
    """

    address: str
    model: str | None = None
    name: str
    session_secret: bytes
    connect_timeout_s: float | None = None
    ready_timeout_s: float | None = 600.0
    answer_timeout_s: float = 10.0
    worker_lost_timeout_s: float = 60.0
    resume: bool = True
    is_absent: Callable[[str], bool] = is_absent

    @property
    def connect_s(self) -> float:
        """Seconds to wait for a sign of life."""
        return CONNECT_S if self.connect_timeout_s is None else self.connect_timeout_s

    @property
    def first_sign_s(self) -> float:
        """Time-out of a connection: `connect_s`, or 0 where nothing can answer and the user chose no time."""
        return 0.0 if self.connect_timeout_s is None and self.is_absent(self.address) else self.connect_s


@dataclass(frozen=True, slots=True)
class Opening:
    """State of the worker found by a new live connection: whether it has restarted, and which requests it holds."""

    restarted: bool
    same_model: bool
    held: dict[str, WatermarkRow]


class Connection:
    """State of the session with the worker. It sends only hello; `RequestTable` sends the commands of requests."""

    def __init__(self, config: SessionConfig, calls: CallTable) -> None:
        self._config = config
        self._outbox = calls.outbox
        self._calls = calls
        self.phase = Phase.IDLE
        self.phase_since = 0.0
        self.lost_at = -inf
        self.opening_since: float | None = None
        self.was_live = False
        self.epoch = b""
        self.topic = b""
        self.limits: Limits | None = None
        self.model: ModelCard | None = None
        self.lease_s = 60.0
        self._epoch_before = b""
        self._model_before: ModelCard | None = None
        self._description: Description | None = None
        self._welcome: Welcome | None = None
        self._told_lost = False

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's end tokens, once it is known."""
        return frozenset(self.model.eos_token_ids) if self.model is not None else frozenset()

    def begin(self, now: float) -> None:
        """Start to open a session, unless that is under way."""
        if self._may(ConnectionEvent.NEEDED):
            self._follow(ConnectionEvent.NEEDED, now)

    def described(self, description: Description, now: float) -> bool:
        """Send hello if the worker can take a session; returns whether it can."""
        if not self._may(ConnectionEvent.READY) or description.state not in ("ready", "draining"):
            return False
        before, self._description = self._description, description
        # A new worker process gets the full time to open a session.
        if self.opening_since is None or (before is not None and before.epoch != description.epoch):
            self.opening_since = now
        self._follow(ConnectionEvent.READY, now)
        config = self._config
        self._outbox.actions.append(OpenCommands(as_seen_from(config.address, description.cmd)))
        versions = (PROTOCOL_VERSION, PROTOCOL_VERSION)
        self._calls.send(lambda call: Hello(call, versions, config.name, config.session_secret), now)
        return True

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Subscribe to the session's topic. False if the worker is no longer the one that was described."""
        description = self._description
        if not self._may(ConnectionEvent.WELCOME) or description is None:
            return True
        if welcome.epoch != description.epoch:
            return False
        self._welcome = welcome
        self.epoch = welcome.epoch
        self.topic = welcome.topic.encode()
        self.limits = welcome.limits
        self.model = description.model
        self.lease_s = welcome.lease_ms / 1000
        self._follow(ConnectionEvent.WELCOME, now)
        address = as_seen_from(self._config.address, description.out)
        self._outbox.actions.append(OpenOutput(address, self.topic))
        return True

    def granted(self, granted: Granted, now: float) -> Opening | None:
        """The session is open. None if the message is stale."""
        welcome = self._welcome
        if not self._may(ConnectionEvent.GRANTED) or welcome is None or granted.session != welcome.session:
            return None
        restarted = self.was_live and self.epoch != self._epoch_before
        opening = Opening(restarted, self._is_same_model(), {row.request: row for row in welcome.requests})
        if self.was_live:
            self._outbox.counters.reconnects += 1
        if restarted:
            self._outbox.counters.worker_restarts += 1
            self._tell("restarted", "the worker was restarted")
        self._epoch_before, self._model_before = self.epoch, self.model
        self.was_live = True
        self.opening_since = None
        self._told_lost = False
        self._follow(ConnectionEvent.GRANTED, now)
        self._tell("connected", f"session {welcome.session} with worker {welcome.epoch.hex()}")
        return opening

    def lose(self, now: float, reason: str) -> None:
        """The session is unusable: describe again."""
        if self.phase is Phase.LIVE:
            self.lost_at = now
            self._told_lost = True
            self._tell("lost", reason)
        self._drop(ConnectionEvent.LOST, now)

    def worker_came(self) -> None:
        """Note that a worker is reachable: its loss is an event again."""
        self._told_lost = False

    def worker_went(self, reason: str) -> None:
        """Note that ctl lost the worker. `lose` ends a live session when its connection to cmd breaks."""
        if self.phase in (Phase.LIVE, Phase.FENCED, Phase.CLOSED):
            return
        # Time without a worker does not count as time spent opening a session.
        self.opening_since = None
        if not self._told_lost:
            self._told_lost = True
            self._tell("lost", reason)

    def rest(self, now: float) -> None:
        """Stop opening a session that no request needs any more."""
        if self._may(ConnectionEvent.NOT_NEEDED):
            self.opening_since = None
            self._drop(ConnectionEvent.NOT_NEEDED, now)

    def fence(self, now: float) -> None:
        """Another client took over the session. Final."""
        self._drop(ConnectionEvent.FENCED, now)
        self._tell("fenced", "another client took this session over")

    def close(self, now: float) -> None:
        """Final. Idempotent."""
        if self._may(ConnectionEvent.CLOSED):
            self._drop(ConnectionEvent.CLOSED, now)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to cmd that can be lost."""
        return self._may(ConnectionEvent.LOST)

    def attempt_until(self) -> float:
        """The time at which a step of the opening times out and a new attempt is due."""
        return self.phase_since + STEP_S if self.phase in (Phase.HELLO, Phase.SUBSCRIBING) else inf

    def _is_same_model(self) -> bool:
        before, model = self._model_before, self.model
        if before is None or model is None:
            return True
        return (before.name, before.vocab_size, before.tokenizer_hash) == (
            model.name,
            model.vocab_size,
            model.tokenizer_hash,
        )

    def _drop(self, event: ConnectionEvent, now: float) -> None:
        self._follow(event, now)
        self._calls.clear()
        self._outbox.actions.append(CloseWorkerSockets())
        self._welcome = None

    def _may(self, event: ConnectionEvent) -> bool:
        return event in CONNECTION[self.phase]

    def _follow(self, event: ConnectionEvent, now: float) -> None:
        self.phase = follow(CONNECTION, self.phase, event)
        self.phase_since = now

    def _tell(self, kind: EventKind, message: str) -> None:
        self._outbox.events.append(ClientEvent(kind, message))
