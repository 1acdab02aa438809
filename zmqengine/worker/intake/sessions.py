"""Sessions by secret, connection and topic, from hello to bye."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator

from zmqengine.errors import (
    BadRequest,
    Fenced,
    NotAuthorized,
    Overloaded,
    UnknownSession,
    UnsupportedProtocol,
)
from zmqengine.protocol.messages import PROTOCOL_VERSION, Hello
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.session import Session, new_topic

PEER_SESSIONS_MIN = 8
"""Sessions that every key may have: a share of a small maximum could be 0."""
SUBSCRIBE_S = 5.0
"""Minimum seconds from hello to the first subscription."""


class SessionTable:
    """Table of sessions by secret, connection and topic."""

    def __init__(self, context: WorkerContext, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._sessions_max = context.config.sessions_max
        self._lease_s = context.config.lease_ms / 1000
        self._grace_s = context.config.grace_ms / 1000
        self._by_secret: dict[bytes, Session] = {}
        self._by_route: dict[bytes, Session] = {}
        self._by_topic: dict[bytes, Session] = {}
        self._fenced: OrderedDict[bytes, None] = OrderedDict()
        self._peer_max = max(PEER_SESSIONS_MIN, int(self._sessions_max * context.config.peer_share))
        self._opened_by: dict[Session, str] = {}
        self._opened: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_secret.values())

    def hello(self, message: Hello, route: bytes, user: str, now_s: float, peer: str = "") -> Session:
        """Open, find or take over the session of this secret.

        `peer`: the sender's key or process, as far as it is known; each gets a share of the sessions at most. Raises
        `UnsupportedProtocol`, `Overloaded`, or `NotAuthorized` when the session belongs to another key.
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
            if peer and self._opened[peer] >= self._peer_max:
                raise Overloaded(
                    f"this front-end has {self._opened[peer]} of {self._sessions_max} sessions; end some with bye",
                    retry_after_ms=1000,
                )
            session = Session(digest, user, message.client, route)
            self._by_secret[digest] = session
            self._opened_by[session] = peer
            self._opened[peer] += 1
            self._index(session)
            self._outgoing.open(session)
            session.grace_deadline_s = now_s + max(self._grace_s, SUBSCRIBE_S)
        elif session.user != user:
            raise NotAuthorized("this session belongs to another key")
        elif session.route != route:
            self._take_over(session, message, route, now_s)
        self.renew(session, now_s)
        return session

    def of_route(self, route: bytes, user: str) -> Session:
        """The session of a connection with this key. Raises `UnknownSession` or `Fenced`.

        A connection chooses its own routing id: after its end, another key may connect with the same one.
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
        """Renew a session's lease: any command shows that the front-end lives."""
        session.lease_deadline_s = now_s + self._lease_s

    def subscribed(self, topic: bytes, user: str) -> Session | None:
        """The session of this topic, if `user` may subscribe to it; else None."""
        session = self._by_topic.get(topic)
        if session is None or session.user != user:
            return None
        session.subscribers += 1
        session.grace_deadline_s = None
        return session

    def granted(self, session: Session) -> None:
        """Note and report that a session's subscription is in force."""
        self._outgoing.grant(session)

    def unsubscribed(self, topic: bytes, now_s: float) -> Session | None:
        """Note the end of a subscription; the last one starts the grace period."""
        session = self._by_topic.get(topic)
        if session is None or session.subscribers == 0:
            return None
        session.subscribers -= 1
        if session.subscribers == 0:
            session.grace_deadline_s = now_s + self._grace_s
        return session

    def acknowledge(self, session: Session, request: LiveRequest) -> None:
        """Drop an ended request and its output."""
        if session.requests.pop(request.id, None) is not None:
            self._outgoing.forget(request)

    def forget_oldest_delivered(self, session: Session, *, bytes_max: int, requests_max: int) -> int:
        """Bound the held output of a session by dropping requests that ended and were sent, but never acknowledged.

        Returns the bytes still held.
        """

        def is_within_bounds() -> bool:
            return self._outgoing.held_bytes(session) <= bytes_max and len(session.requests) < requests_max

        if not is_within_bounds():
            for request in [request for request in session.requests.values() if request.is_fully_sent]:
                self.acknowledge(session, request)
                if is_within_bounds():
                    break
        return self._outgoing.held_bytes(session)

    def keep_output_within(self, session: Session, bytes_max: int) -> None:
        """Bound a session's output by dropping sent and unacknowledged parts of it.

        Ended requests are dropped first, then log-probabilities of others, the largest first.
        """
        if self._outgoing.held_bytes(session) <= bytes_max:
            return
        if (
            self.forget_oldest_delivered(session, bytes_max=bytes_max, requests_max=len(session.requests) + 1)
            <= bytes_max
        ):
            return
        for request in sorted(session.requests.values(), key=lambda one: one.log.nbytes, reverse=True):
            self._outgoing.forget_sent(request)
            if self._outgoing.held_bytes(session) <= bytes_max:
                break

    def remove(self, session: Session) -> None:
        """Send a session its remaining output, and remove it. Its requests must have ended before."""
        self._outgoing.close(session)
        self._by_secret.pop(session.secret_digest, None)
        self._by_route.pop(session.route, None)
        self._by_topic.pop(session.topic, None)
        peer = self._opened_by.pop(session, "")
        self._opened[peer] -= 1
        if not self._opened[peer]:
            del self._opened[peer]

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
        session.grace_deadline_s = now_s + max(self._grace_s, SUBSCRIBE_S)
        self._outgoing.reopen(session)
        self._index(session)
