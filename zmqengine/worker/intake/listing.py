"""Listings of sessions and requests for operators."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from zmqengine.protocol.messages import RequestInfo, SessionInfo
from zmqengine.worker.lifecycle import Lifecycle
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.wire.outgoing import Outgoing
from zmqengine.worker.wire.session import Session

LISTED_MAX = 256
"""Maximum entries of each kind, since a listing is part of a pass."""


def list_sessions(sessions: Iterable[Session], outgoing: Outgoing) -> list[SessionInfo]:
    """The oldest sessions, in order."""
    return [_session(session, outgoing) for session in islice(sessions, LISTED_MAX)]


def list_requests(scheduler: Scheduler, lifecycle: Lifecycle, now_s: float) -> list[RequestInfo]:
    """Running requests, then waiting ones, up to `LISTED_MAX` in all."""
    waiting = (request for request in lifecycle.live() if request.phase != "running")
    return [
        _request(request, lifecycle.waits_for(request, now_s), now_s)
        for request in islice(chain(scheduler.running.values(), waiting), LISTED_MAX)
    ]


def _session(session: Session, outgoing: Outgoing) -> SessionInfo:
    phases = [request.phase for request in session.requests.values()]
    running, ended = phases.count("running"), phases.count("ended")
    backlog = outgoing.backlog_tokens(session)
    return SessionInfo(
        id=session.id,
        client=session.client,
        running=running,
        waiting=len(phases) - running - ended,
        held=len(phases),
        unsent_tokens=backlog,
        lagging=backlog > 0,
    )


def _request(request: LiveRequest, waits_for: str, now_s: float) -> RequestInfo:
    return RequestInfo(
        request=request.id,
        session=request.session_id,
        phase=_phase(request),
        waits_for=waits_for,
        age_s=round(now_s - request.accepted_s, 3),
        prompt_tokens=request.prompt_tokens,
        prefilled_tokens=request.prefilled_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=request.output_tokens,
        max_tokens=max(0, request.tokens_max - request.prompt_tokens),
        priority=request.ticket.priority,
    )


def _phase(request: LiveRequest) -> str:
    if request.phase != "running":
        return request.phase
    if request.embeds:
        return "embed"
    return "prefill" if len(request.log) == request.joined_at else "decode"
