"""A session with a target of either kind."""

from __future__ import annotations

from zmqengine.bench.targets.http_target import HttpSession
from zmqengine.bench.targets.target import TargetSession, TargetSpec


async def open_session(spec: TargetSpec, *, timeout_s: float, streams: int = 0) -> TargetSession:
    """A session whose requests end, if nothing else ends them, after `timeout_s`. Raises TargetError.

    It is connected for so many streams at once: one to our worker always is, and the other's first requests would have
    to wait for a connection.
    """
    if spec.kind == "http":
        session = HttpSession(spec, timeout_s=timeout_s)
        await session.connect(streams)
        return session
    # A server of somebody else's can be measured where only the HTTP half is installed.
    from zmqengine.bench.targets.worker_target import WorkerSession

    return await WorkerSession.open(spec, timeout_s=timeout_s)
