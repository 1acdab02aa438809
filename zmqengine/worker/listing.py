"""Who is connected and what runs and waits, for operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from zmqengine.protocol.messages import RequestInfo, SessionInfo
from zmqengine.worker.request import LiveRequest
from zmqengine.worker.scheduler import Scheduler
from zmqengine.worker.sessions import Session

LISTED_MAX = 256
"""Of each kind: listing is part of a pass and must stay short."""


def list_sessions(sessions: Iterable[Session]) -> list[SessionInfo]:
    """The first sessions there are, the oldest first."""
    return [_session(session) for session in islice(sessions, LISTED_MAX)]


def list_requests(scheduler: Scheduler, now_s: float) -> list[RequestInfo]:
    """What runs, then what waits, up to `LISTED_MAX` in all."""
    return [_request(request, scheduler, now_s) for request in islice(_unended(scheduler), LISTED_MAX)]


def _session(session: Session) -> SessionInfo:
    phases = [request.phase for request in session.requests.values()]
    return SessionInfo(
        id=session.id,
        client=session.client,
        running=phases.count("running"),
        waiting=phases.count("queued"),
        held=len(phases),
        unsent_tokens=session.unsent_tokens,
        lagging=session.lagging,
    )


def _unended(scheduler: Scheduler) -> Iterator[LiveRequest]:
    yield from scheduler.running.values()
    yield from sorted(scheduler.waiting(), key=lambda request: (request.priority, request.arrival))


def _request(request: LiveRequest, scheduler: Scheduler, now_s: float) -> RequestInfo:
    return RequestInfo(
        request=request.id,
        session=request.session.id,
        phase=_phase(request),
        waits_for=_waits_for(request, scheduler),
        age_s=round(now_s - request.accepted_s, 3),
        prompt_tokens=request.prompt_tokens,
        prefilled_tokens=request.prefilled_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=len(request.log),
        max_tokens=request.insert.max_tokens if request.insert is not None else 0,
        priority=request.priority,
    )


def _phase(request: LiveRequest) -> str:
    if request.phase != "running":
        return request.phase
    return "prefill" if request.last_token_s is None else "decode"


def _waits_for(request: LiveRequest, scheduler: Scheduler) -> str:
    """What keeps a request from its row: every row is taken, it does not fit yet, or those before it."""
    if request.phase != "queued":
        return ""
    if scheduler.is_full:
        return "row"
    return "memory" if request is scheduler.head() else "turn"
