# Made from ../aio/in_flight.py by `python -m tools`: change that one.
"""Requests in flight for one call, awaited in the order of their start."""

from __future__ import annotations

from collections import deque

from zmqengine_client.core.request import Request
from zmqengine_client.sync.io_thread import IoThread
from zmqengine_client.sync.waiting import Notifier


class InFlight:
    """The requests that one call of the client has started and not yet taken."""

    def __init__(self, driver: IoThread) -> None:
        self._driver = driver
        self._requests: deque[tuple[Request, Notifier]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def start(self, request: Request) -> None:
        """Start a request, unless it has ended already."""
        request.listener = notifier = Notifier()
        self._requests.append((request, notifier))
        if not request.ended:
            self._driver.start(request)

    def take_oldest(self) -> Request:
        """Wait for the end of the oldest request and return it. Raises the error of one that failed."""
        request, notifier = self._requests[0]
        while not request.ended:
            self._driver.check_waiting()
            notifier.mailbox.wait()
        failure = request.failure()
        if failure is not None:
            raise failure
        self._requests.popleft()
        return request

    def abort(self) -> None:
        """Abort the requests that were not taken."""
        for request, _ in self._requests:
            self._driver.abort(request)
