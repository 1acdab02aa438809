"""Waiting of a task: for notices of streams, for a lock, for work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Lock = asyncio.Lock
off_loop = asyncio.to_thread

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


async def off_loop_unless(
    short: bool,
    function: Callable[ParametersT, ResultT],
    *args: ParametersT.args,
    **kwargs: ParametersT.kwargs,
) -> ResultT:
    """Call in a thread; a `short` call in place, which blocks the loop no longer than the two thread switches."""
    return function(*args, **kwargs) if short else await off_loop(function, *args, **kwargs)


class AsyncMailbox:
    """A queue of notices on the event loop. Streams can share one, so that one wait covers them all."""

    def __init__(self) -> None:
        self._ready: dict[AsyncNotifier, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_news(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._ready)

    def put(self, notifier: AsyncNotifier) -> None:
        """Note that `notifier` has news."""
        self._ready[notifier] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[AsyncNotifier]:
        """Notifiers with news since the last call; waits for the first. Raises RuntimeError if another task waits."""
        while not self._ready:
            if self._waiter is not None and not self._waiter.done():
                raise RuntimeError("another task waits for this: a stream is read by one at a time")
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            waiter = self._waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                # A task that is cancelled gets here after the next one has begun to wait.
                if self._waiter is waiter:
                    self._waiter = None
        ready = list(self._ready)
        self._ready.clear()
        return ready


class AsyncNotifier:
    """The listener of one request or control call. Its mailbox can be changed while it is in use."""

    __slots__ = ("mailbox",)

    def __init__(self) -> None:
        self.mailbox = AsyncMailbox()

    def notify(self) -> None:
        """Called on the event loop."""
        self.mailbox.put(self)
