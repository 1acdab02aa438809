"""Sessions with targets of either kind."""

from __future__ import annotations

from zmqengine.bench.targets.http_target import HttpSession
from zmqengine.bench.targets.target import TargetSession, TargetSpec


async def open_session(spec: TargetSpec, *, timeout_s: float, streams: int = 0) -> TargetSession:
    """Open a session whose requests time out after `timeout_s`. Raises TargetError.

    `streams` HTTP connections are opened in advance, or the first requests would wait for theirs; a session with a
    worker has one connection for all.
    """
    if spec.kind == "http":
        session = HttpSession(spec, timeout_s=timeout_s)
        await session.connect(streams)
        return session
    # Foreign servers can be measured where the client's dependencies are missing.
    from zmqengine.bench.targets.worker_target import WorkerSession

    return await WorkerSession.open(spec, timeout_s=timeout_s)
