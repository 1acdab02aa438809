"""What a client tells its owner beside the streams: events as they happen, and counters."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

EventKind = Literal["connected", "lost", "restarted", "resumed", "fatal", "fenced"]


class ClientEvent(Struct, frozen=True):
    """Something happened to the connection.

    connected: a session is open. lost: the connection to the worker broke, with a session or before there was one;
    the streams wait. restarted: the worker that answers is another process. resumed: this request goes on in the
    new worker. fatal: the worker says that it is about to exit. fenced: another client took the session over.
    """

    kind: EventKind
    message: str
    request_id: str | None = None


class Counters(Struct):
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
