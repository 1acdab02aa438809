"""Requests in flight for one call, awaited in the order of their start."""

from __future__ import annotations

from collections import deque

from zmqengine_client.aio.loop_driver import LoopDriver
from zmqengine_client.aio.waiting import AsyncNotifier
from zmqengine_client.core.request import Request


class AsyncInFlight:
    """The requests that one call of the client has started and not yet taken."""

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver
        self._requests: deque[tuple[Request, AsyncNotifier]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def start(self, request: Request) -> None:
        """Start a request, unless it has ended already."""
        request.listener = notifier = AsyncNotifier()
        self._requests.append((request, notifier))
        if not request.ended:
            self._driver.start(request)

    async def take_oldest(self) -> Request:
        """Wait for the end of the oldest request and return it. Raises the error of one that failed."""
        request, notifier = self._requests[0]
        while not request.ended:
            self._driver.check_waiting()
            await notifier.mailbox.wait()
        failure = request.failure()
        if failure is not None:
            raise failure
        self._requests.popleft()
        return request

    def abort(self) -> None:
        """Abort the requests that were not taken."""
        for request, _ in self._requests:
            self._driver.abort(request)
