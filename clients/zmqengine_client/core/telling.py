"""Hands the core's news to those who wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from zmqengine_client.core.actions import Outbox
from zmqengine_client.core.events import ClientEvent

log = logging.getLogger("zmqengine.client")


def tell(outbox: Outbox, on_event: Callable[[ClientEvent], None] | None) -> None:
    """Wake the listeners of what has changed, and report events. What `on_event` raises is logged."""
    for item in outbox.take_changed():
        if item.listener is not None:
            item.listener.notify()
    for event in outbox.take_events():
        log.info("%s: %s", event.kind, event.message)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:
                log.exception("on_event failed")
