"""Who a client is, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """See `Client` for the fields."""

    address: str
    name: str
    session_secret: bytes
    connect_timeout_s: float = 10.0
    ready_timeout_s: float | None = 600.0
    answer_timeout_s: float = 10.0
    worker_lost_timeout_s: float = 60.0
    resume: bool = True
