"""Waiting of a thread: for the I/O thread, for a lock. Work that a task gives to a thread is done in place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

Lock = threading.Lock


def off_loop(
    function: Callable[ParametersT, ResultT], *args: ParametersT.args, **kwargs: ParametersT.kwargs
) -> ResultT:
    """Call `work` in place: there is no event loop to block."""
    return function(*args, **kwargs)


def off_loop_unless(
    short: bool,
    function: Callable[ParametersT, ResultT],
    *args: ParametersT.args,
    **kwargs: ParametersT.kwargs,
) -> ResultT:
    """Call in place."""
    return function(*args, **kwargs)


class Mailbox:
    """A queue of notices. Streams can share one, so that one wait covers them all."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._ready: dict[Notifier, None] = {}
        self._has_waiter = False

    @property
    def has_news(self) -> bool:
        """Whether `wait` would return at once."""
        with self._condition:
            return bool(self._ready)

    def put(self, notifier: Notifier) -> None:
        """Note that `notifier` has news."""
        with self._condition:
            self._ready[notifier] = None
            self._condition.notify()

    def wait(self) -> list[Notifier]:
        """Notifiers with news since the last call; waits for the first. Raises RuntimeError if another thread waits."""
        with self._condition:
            if self._has_waiter:
                raise RuntimeError("another thread waits for this: a stream is read by one at a time")
            self._has_waiter = True
            try:
                while not self._ready:
                    self._condition.wait()
            finally:
                self._has_waiter = False
            ready, self._ready = self._ready, {}
        return list(ready)


class Notifier:
    """The listener of one request or control call. Its mailbox can be changed while it is in use."""

    __slots__ = ("mailbox",)

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    def notify(self) -> None:
        """Called on the I/O thread."""
        self.mailbox.put(self)
