"""The requests of a session that have not ended, by id."""

from __future__ import annotations

from collections.abc import Iterator

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import End, Finish
from zmqengine_client.core.acknowledgements import Acknowledgements
from zmqengine_client.core.calls import CallTable
from zmqengine_client.core.phases import RequestEvent
from zmqengine_client.core.request import Request


class LiveRequests:
    """Who is here, and how each of them leaves. `acks` are the ends that the worker is to be told of."""

    def __init__(self, calls: CallTable) -> None:
        self.by_id: dict[str, Request] = {}
        self.acks = Acknowledgements(calls)
        self._outbox = calls.outbox

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Request]:
        """Those that are here now: they may leave meanwhile."""
        return iter(tuple(self.by_id.values()))

    def end(
        self, request: Request, *, finish: Finish | None = None, error: ZmqEngineError | None = None
    ) -> None:
        """End a request that has not ended: as `finish` says, with an error, or with the `end` it has got."""
        request.follow(RequestEvent.ENDED)
        if finish is not None:
            request.end = End(finish, prompt_tokens=len(request.prompt))
        request.error = error
        request.ahead.clear()
        if self.by_id.get(request.id) is request:
            del self.by_id[request.id]
        self._outbox.mark(request)

    def abort_all(self) -> None:
        """The client is being closed: that aborts what runs."""
        for request in self:
            self.end(request, finish="abort")

    def fail_all(self, error: ZmqEngineError) -> None:
        """End every request with this error, each with an exception object of its own."""
        for request in self:
            self.end(request, error=type(error)(error.message, retry_after_ms=error.retry_after_ms))
