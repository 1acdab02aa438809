"""Errors of our client as gRPC statuses."""

from __future__ import annotations

import grpc

from zmqengine_client import errors

Code = grpc.StatusCode

# The first class that fits decides.
_CODES: tuple[tuple[type[errors.ZmqEngineError], grpc.StatusCode], ...] = (
    (errors.Conflict, Code.ALREADY_EXISTS),
    (errors.UnknownRequest, Code.INTERNAL),
    (errors.NeverFits, Code.FAILED_PRECONDITION),
    (errors.RequestError, Code.INVALID_ARGUMENT),
    (errors.NotAuthorized, Code.PERMISSION_DENIED),
    (errors.Overloaded, Code.RESOURCE_EXHAUSTED),
    (errors.Unavailable, Code.UNAVAILABLE),
    (errors.SessionError, Code.UNAVAILABLE),
    (errors.AnswerTimeout, Code.UNAVAILABLE),
    (errors.LeaseExpired, Code.UNAVAILABLE),
    (errors.ShutDown, Code.UNAVAILABLE),
    (errors.DeadlineExceeded, Code.DEADLINE_EXCEEDED),
    (errors.Aborted, Code.CANCELLED),
    (errors.ZmqEngineError, Code.INTERNAL),
)


def status_of(error: errors.ZmqEngineError) -> grpc.StatusCode:
    """What a gateway is told: whether the request is at fault, or may go elsewhere, or may come again."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def trailers_of(error: errors.ZmqEngineError) -> tuple[tuple[str, str], ...]:
    """When to try again, in the form that gRPC's retry policies read."""
    if error.retry_after_ms is None:
        return ()
    return (("grpc-retry-pushback-ms", str(error.retry_after_ms)),)
