"""State machines of a connection and of a request: every phase, and every event that leads from one to another.

`follow` refuses transitions that are not in the tables. docs/client.md draws them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar


class Phase(Enum):
    """Phases of the connection."""

    IDLE = "idle"
    """No session is needed yet."""
    DESCRIBING = "describing"
    """Repeating `describe` on ctl until the worker is ready."""
    HELLO = "hello"
    """Waiting for welcome."""
    SUBSCRIBING = "subscribing"
    """Waiting for granted."""
    LIVE = "live"
    """Commands and output flow."""
    FENCED = "fenced"
    """Another client took over the session."""
    CLOSED = "closed"


class ConnectionEvent(Enum):
    """Events that change the phase of a connection."""

    NEEDED = "a request needs a session"
    READY = "the worker is ready"
    WELCOME = "welcome"
    GRANTED = "granted"
    LOST = "lost"
    NOT_NEEDED = "no request needs it"
    FENCED = "fenced"
    CLOSED = "the client is closed"


class RequestPhase(Enum):
    WAITING = "waiting"
    """Waits for a connection: it was never sent."""
    INSERTING = "inserting"
    """Sent, without a reply."""
    PUT_OFF = "put off"
    """A restarted worker had no room: it is inserted again later."""
    ACCEPTED = "accepted"
    """The worker holds it."""
    ENDED = "ended"


class RequestEvent(Enum):
    """Events that change the phase of a request."""

    INSERTED = "insert is sent"
    ACCEPTED = "accepted"
    HELD = "welcome names it"
    REFUSED_FOR_NOW = "refused for now"
    ENDED = "end or error"


CONNECTION: Mapping[Phase, Mapping[ConnectionEvent, Phase]] = {
    Phase.IDLE: {
        ConnectionEvent.NEEDED: Phase.DESCRIBING,
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.DESCRIBING: {
        ConnectionEvent.READY: Phase.HELLO,
        ConnectionEvent.NOT_NEEDED: Phase.IDLE,
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.HELLO: {
        ConnectionEvent.WELCOME: Phase.SUBSCRIBING,
        ConnectionEvent.LOST: Phase.DESCRIBING,
        ConnectionEvent.NOT_NEEDED: Phase.IDLE,
        ConnectionEvent.FENCED: Phase.FENCED,
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.SUBSCRIBING: {
        ConnectionEvent.GRANTED: Phase.LIVE,
        ConnectionEvent.LOST: Phase.DESCRIBING,
        ConnectionEvent.NOT_NEEDED: Phase.IDLE,
        ConnectionEvent.FENCED: Phase.FENCED,
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.LIVE: {
        ConnectionEvent.LOST: Phase.DESCRIBING,
        ConnectionEvent.FENCED: Phase.FENCED,
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.FENCED: {
        ConnectionEvent.CLOSED: Phase.CLOSED,
    },
    Phase.CLOSED: {},
}

REQUEST: Mapping[RequestPhase, Mapping[RequestEvent, RequestPhase]] = {
    RequestPhase.WAITING: {
        RequestEvent.INSERTED: RequestPhase.INSERTING,
        RequestEvent.ENDED: RequestPhase.ENDED,
    },
    RequestPhase.INSERTING: {
        RequestEvent.ACCEPTED: RequestPhase.ACCEPTED,
        RequestEvent.HELD: RequestPhase.ACCEPTED,
        RequestEvent.REFUSED_FOR_NOW: RequestPhase.PUT_OFF,
        # The connection was lost before the reply.
        RequestEvent.INSERTED: RequestPhase.INSERTING,
        RequestEvent.ENDED: RequestPhase.ENDED,
    },
    RequestPhase.PUT_OFF: {
        RequestEvent.INSERTED: RequestPhase.INSERTING,
        # An earlier insert was answered after all.
        RequestEvent.ACCEPTED: RequestPhase.ACCEPTED,
        RequestEvent.HELD: RequestPhase.ACCEPTED,
        RequestEvent.ENDED: RequestPhase.ENDED,
    },
    RequestPhase.ACCEPTED: {
        # The worker has restarted, or has forgotten it.
        RequestEvent.INSERTED: RequestPhase.INSERTING,
        RequestEvent.ACCEPTED: RequestPhase.ACCEPTED,
        RequestEvent.HELD: RequestPhase.ACCEPTED,
        RequestEvent.ENDED: RequestPhase.ENDED,
    },
    RequestPhase.ENDED: {},
}

PhaseT = TypeVar("PhaseT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


def follow(table: Mapping[PhaseT, Mapping[EventT, PhaseT]], phase: PhaseT, event: EventT) -> PhaseT:
    """The phase after `event`. Raises AssertionError for a transition that is not in the table: a bug in the core."""
    after = table[phase].get(event)
    if after is None:
        raise AssertionError(f"{event.value!r} cannot happen while {phase.value}")
    return after
