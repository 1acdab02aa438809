"""Session of one front-end: its identity, its address, and its unacknowledged requests."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

from zmqengine.protocol.messages import WatermarkRow
from zmqengine.worker.requests.live_request import LiveRequest

EARLY_ABORTS_MAX = 1024
"""Maximum aborts of a session that are kept for requests that have not arrived yet."""


def new_topic() -> bytes:
    """An unguessable topic of fixed length: no topic is a prefix of another."""
    return b"s/" + secrets.token_hex(16).encode() + b"/"


@dataclass(eq=False, slots=True)
class Session:
    """A session: `route` is its connection to cmd, `topic` its subscription on out, `user` its key."""

    secret_digest: bytes
    user: str
    client: str
    route: bytes
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    topic: bytes = field(default_factory=new_topic)
    subscribers: int = 0
    lease_deadline_s: float = 0.0
    grace_deadline_s: float | None = None
    watermark_s: float = 0.0
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    early_aborts: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def is_granted(self) -> bool:
        """Whether the session's owner is subscribed to its topic."""
        return self.subscribers > 0

    def watermarks(self) -> list[WatermarkRow]:
        """The requests of this session by id."""
        return [
            WatermarkRow(request.id, len(request.log), request.end is not None)
            for request in self.requests.values()
        ]

    def remember_early_abort(self, request_id: str) -> None:
        """Note an abort that arrived before its insert, which is then refused."""
        self.early_aborts[request_id] = None
        self.early_aborts.move_to_end(request_id)
        while len(self.early_aborts) > EARLY_ABORTS_MAX:
            self.early_aborts.popitem(last=False)
