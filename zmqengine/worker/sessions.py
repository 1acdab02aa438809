"""The sessions of a worker: who they are, what they may read, how long they live."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterator

from zmqengine.errors import (
    BadRequest,
    Fenced,
    NotAuthorized,
    Overloaded,
    UnknownSession,
    UnsupportedProtocol,
)
from zmqengine.protocol.messages import PROTOCOL_VERSION, Hello, WatermarkRow
from zmqengine.worker.request import LiveRequest

EARLY_ABORTS_MAX = 1024


class Session:
    """One front-end. Holds its requests until they are acknowledged."""

    __slots__ = (
        "client",
        "dirty",
        "early_aborts",
        "frames",
        "grace_deadline_s",
        "id",
        "lagging",
        "lease_deadline_s",
        "log_bytes",
        "progress",
        "requests",
        "retry_s",
        "route",
        "secret_digest",
        "subscribers",
        "topic",
        "user",
        "watermark_s",
    )

    def __init__(self, secret_digest: bytes, user: str, client: str, route: bytes) -> None:
        self.id = secrets.token_hex(4)
        self.secret_digest = secret_digest
        self.user = user
        self.client = client
        self.route = route
        self.topic = new_topic()
        self.subscribers = 0
        self.lease_deadline_s = 0.0
        self.grace_deadline_s: float | None = None
        self.watermark_s = 0.0
        self.requests: dict[str, LiveRequest] = {}
        self.early_aborts: OrderedDict[str, None] = OrderedDict()
        self.dirty: dict[LiveRequest, None] = {}
        self.progress: dict[LiveRequest, tuple[int, int, int]] = {}
        self.frames = 0
        self.lagging = False
        self.retry_s = 0.0
        self.log_bytes = 0

    @property
    def is_granted(self) -> bool:
        """Whether somebody who owns this session is subscribed to its topic."""
        return self.subscribers > 0

    @property
    def unsent_tokens(self) -> int:
        """Tokens made and not yet taken by the socket."""
        return sum(len(request.log) - request.log.sent for request in self.dirty)

    def watermarks(self) -> list[WatermarkRow]:
        """Where every request is."""
        return [
            WatermarkRow(request.id, len(request.log), request.end is not None)
            for request in self.requests.values()
        ]

    def remember_early_abort(self, request_id: str) -> None:
        """An abort came before its insert: refuse the insert when it comes."""
        self.early_aborts[request_id] = None
        self.early_aborts.move_to_end(request_id)
        while len(self.early_aborts) > EARLY_ABORTS_MAX:
            self.early_aborts.popitem(last=False)

    def forget(self, request: LiveRequest) -> None:
        """Drop an ended request and its log."""
        if self.requests.pop(request.id, None) is not None:
            self.log_bytes -= request.log.nbytes
            self.dirty.pop(request, None)
            self.progress.pop(request, None)

    def forget_oldest_delivered(self, *, bytes_max: int, requests_max: int) -> None:
        """Keep the logs within bounds, at the cost of requests that ended, were sent and never acknowledged."""
        if self.log_bytes <= bytes_max and len(self.requests) < requests_max:
            return
        for request in [request for request in self.requests.values() if request.is_fully_sent]:
            if self.log_bytes <= bytes_max and len(self.requests) < requests_max:
                return
            self.forget(request)


class SessionTable:
    """Sessions by secret, by connection and by topic."""

    def __init__(self, *, sessions_max: int, lease_s: float, grace_s: float) -> None:
        self._sessions_max = sessions_max
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._by_secret: dict[bytes, Session] = {}
        self._by_route: dict[bytes, Session] = {}
        self._by_topic: dict[bytes, Session] = {}
        self._fenced: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_secret.values())

    def hello(self, message: Hello, route: bytes, user: str, now_s: float) -> Session:
        """Open, find or take over the session of this secret.

        Raises `UnsupportedProtocol`, `Overloaded`, or `NotAuthorized` when the session belongs to another key.
        """
        low, high = message.protocol
        if not low <= PROTOCOL_VERSION <= high:
            raise UnsupportedProtocol(f"this worker speaks protocol {PROTOCOL_VERSION}, not {low} to {high}")
        digest = hashlib.sha256(message.session_secret).digest()
        session = self._by_secret.get(digest)
        other = self._by_route.get(route)
        if other is not None and other is not session:
            raise BadRequest("this connection has another session; say bye first")
        if session is None:
            if len(self._by_secret) >= self._sessions_max:
                raise Overloaded(f"all {self._sessions_max} sessions are taken", retry_after_ms=1000)
            session = Session(digest, user, message.client, route)
            self._by_secret[digest] = session
            self._index(session)
            session.grace_deadline_s = now_s + max(self._grace_s, 5.0)
        elif session.user != user:
            raise NotAuthorized("this session belongs to another key")
        elif session.route != route:
            self._take_over(session, message, route, now_s)
        self.renew(session, now_s)
        return session

    def of_route(self, route: bytes, user: str) -> Session:
        """The session of a connection with this key. Raises `UnknownSession` or `Fenced`.

        A connection chooses its own routing id: once the first one is gone, another key may come with the same.
        """
        session = self._by_route.get(route)
        if session is not None and session.user != user:
            session = None
        if session is None:
            if route in self._fenced:
                raise Fenced("another connection has taken this session over")
            raise UnknownSession("this connection has no session; say hello first")
        return session

    def renew(self, session: Session, now_s: float) -> None:
        """Any command shows that the front-end lives."""
        session.lease_deadline_s = now_s + self._lease_s

    def subscribed(self, topic: bytes, user: str) -> Session | None:
        """The session to grant this subscription to, or None: then it is nobody's to have."""
        session = self._by_topic.get(topic)
        if session is None or session.user != user:
            return None
        session.subscribers += 1
        session.grace_deadline_s = None
        return session

    def unsubscribed(self, topic: bytes, now_s: float) -> Session | None:
        """A subscriber went away; the last one to go starts the grace period."""
        session = self._by_topic.get(topic)
        if session is None or session.subscribers == 0:
            return None
        session.subscribers -= 1
        if session.subscribers == 0:
            session.grace_deadline_s = now_s + self._grace_s
        return session

    def remove(self, session: Session) -> None:
        """Forget a session. Its requests must have been ended before."""
        self._by_secret.pop(session.secret_digest, None)
        self._by_route.pop(session.route, None)
        self._by_topic.pop(session.topic, None)

    def _index(self, session: Session) -> None:
        self._by_route[session.route] = session
        self._by_topic[session.topic] = session
        self._fenced.pop(session.route, None)

    def _take_over(self, session: Session, message: Hello, route: bytes, now_s: float) -> None:
        del self._by_route[session.route]
        del self._by_topic[session.topic]
        self._fenced[session.route] = None
        while len(self._fenced) > self._sessions_max:
            self._fenced.popitem(last=False)
        session.route = route
        session.client = message.client
        session.topic = new_topic()
        session.subscribers = 0
        session.lagging = False
        session.grace_deadline_s = now_s + max(self._grace_s, 5.0)
        self._index(session)


def new_topic() -> bytes:
    """An unguessable topic of fixed length: no topic is a prefix of another."""
    return b"s/" + secrets.token_hex(16).encode() + b"/"
