"""What the session core asks of its shell: frames to send, sockets to open and close."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from zmqengine_client.core.events import ClientEvent, Counters

Channel = Literal["ctl", "cmd", "out"]


class Send(NamedTuple):
    """Send these frames. If the socket cannot take them now they may be dropped: the core repeats what matters."""

    channel: Channel
    frames: tuple[bytes, bytes]


class OpenCommands(NamedTuple):
    """Connect a new DEALER to the worker's cmd address."""

    address: str


class OpenOutput(NamedTuple):
    """Make a new SUB, subscribe to exactly `topic`, then connect. It replaces an open one."""

    address: str
    topic: bytes


class CloseWorkerSockets(NamedTuple):
    """Close cmd and out with all that is queued on them."""


Action = Send | OpenCommands | OpenOutput | CloseWorkerSockets


class Listener(Protocol):
    """Who waits for a request or a control call: told once after it has changed."""

    def notify(self) -> None: ...


class Changeable(Protocol):
    """A request or a control call."""

    changed: bool

    @property
    def listener(self) -> Listener | None: ...


class Outbox:
    """What the core has to say since its shell last looked."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.changed: list[Changeable] = []
        self.events: list[ClientEvent] = []
        self.counters = Counters()

    def mark(self, item: Changeable) -> None:
        """Note that `item` has news, once."""
        if not item.changed:
            item.changed = True
            self.changed.append(item)

    def take_actions(self) -> list[Action]:
        """The actions to carry out, in order."""
        actions, self.actions = self.actions, []
        return actions

    def take_changed(self) -> list[Changeable]:
        """What has news. From here on it is marked again when there is more."""
        changed, self.changed = self.changed, []
        for item in changed:
            item.changed = False
        return changed

    def take_events(self) -> list[ClientEvent]:
        """The events, in order."""
        events, self.events = self.events, []
        return events
