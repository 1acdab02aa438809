"""What the core has to say: actions for the half that drives it, news for those who wait, events for the owner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from zmqengine_client.core.actions import Action
from zmqengine_client.core.events import ClientEvent, Counters

log = logging.getLogger("zmqengine.client")


class Listener(Protocol):
    """Who waits for a request or a control call: told once after it has changed."""

    def notify(self) -> None: ...


class Changeable(Protocol):
    """A request or a control call."""

    changed: bool

    @property
    def listener(self) -> Listener | None: ...


class Outbox:
    """What has come up since that half last looked."""

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

    def tell(self, on_event: Callable[[ClientEvent], None] | None) -> None:
        """Wake the listeners of what has changed, and report events. What `on_event` raises is logged."""
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
