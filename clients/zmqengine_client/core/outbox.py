"""Everything the core hands to the half that drives it: actions on sockets, changed requests, events, counters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from zmqengine_client.images.prompt_image import PromptImage

log = logging.getLogger("zmqengine.client")

Channel = Literal["ctl", "cmd", "out", "launcher"]


Frames = tuple[bytes, bytes | memoryview]
"""Header and body. A body that is a view is an image's, and is not copied."""


class Send(NamedTuple):
    """Send these frames. They may be dropped if the socket is full: the core repeats commands without a reply."""

    channel: Channel
    frames: Frames


class OpenControl(NamedTuple):
    """Connect a new DEALER to the worker's ctl address: libzmq does not reconnect after a rejected key.

    `address` is that of another worker; None for the present one.
    """

    address: str | None = None


class OpenCommands(NamedTuple):
    """Connect a new DEALER to the worker's cmd address."""

    address: str


class OpenOutput(NamedTuple):
    """Make a new SUB, subscribe to exactly `topic`, then connect. It replaces an open one."""

    address: str
    topic: bytes


class CloseWorkerSockets(NamedTuple):
    """Close cmd and out, and drop their queues."""


class MakePixels(NamedTuple):
    """Make the pixels of these images in a thread, then call `pixels_made` of the session with `key`."""

    key: object
    images: Sequence[PromptImage]


Action = Send | OpenControl | OpenCommands | OpenOutput | CloseWorkerSockets | MakePixels

EventKind = Literal["loading", "connected", "lost", "restarted", "resumed", "fatal", "fenced"]


class ClientEvent(Struct, frozen=True):
    """A change of the connection.

    loading: a launcher tells how far the model is. connected: a session is open. lost: the connection to the worker
    broke, with a session or before there was one; the streams wait. restarted: another worker process answers.
    resumed: this request continues in the new worker. fatal: the worker announced that it is about to exit.
    fenced: another client took over the session.
    """

    kind: EventKind
    message: str
    request_id: str | None = None


class ClientCounters(Struct):
    """Totals since the client was made."""

    reconnects: int = 0
    worker_restarts: int = 0
    resumed_streams: int = 0
    gaps: int = 0
    duplicate_tokens: int = 0
    frames: int = 0
    frames_lost: int = 0
    tokens: int = 0
    command_retries: int = 0
    malformed: int = 0


class Listener(Protocol):
    """A waiter on a request or a control call, notified once after it has changed."""

    def notify(self) -> None: ...


class Changeable(Protocol):
    """A request or a control call."""

    changed: bool

    @property
    def listener(self) -> Listener | None: ...


class Outbox:
    """Actions, changes and events since the half last collected them."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.changed: list[Changeable] = []
        self.events: list[ClientEvent] = []
        self.counters = ClientCounters()

    def mark(self, item: Changeable) -> None:
        """Mark `item` as changed, once."""
        if not item.changed:
            item.changed = True
            self.changed.append(item)

    def take_actions(self) -> list[Action]:
        """The actions to carry out, in order."""
        actions, self.actions = self.actions, []
        return actions

    def take_changed(self) -> list[Changeable]:
        """Requests and control calls that changed. A later change marks them again."""
        changed, self.changed = self.changed, []
        for item in changed:
            item.changed = False
        return changed

    def take_events(self) -> list[ClientEvent]:
        """The events, in order."""
        events, self.events = self.events, []
        return events

    def tell(self, on_event: Callable[[ClientEvent], None] | None) -> None:
        """Notify the listeners of changed items, and report events. Exceptions of `on_event` are logged."""
        for item in self.take_changed():
            if item.listener is not None:
                item.listener.notify()
        for event in self.take_events():
            log.info("%s: %s", event.kind, event.message)
            if on_event is not None:
                try:
                    on_event(event)
                except Exception:
                    log.exception("on_event failed")
