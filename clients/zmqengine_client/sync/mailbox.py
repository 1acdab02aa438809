"""How a thread that reads streams waits for the I/O thread."""

from __future__ import annotations

import threading


class Mailbox:
    """Where notices arrive. Many streams can share one: then one wait covers them all."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._ready: dict[Inbox, None] = {}

    def put(self, inbox: Inbox) -> None:
        """Note that `inbox` has news."""
        with self._condition:
            self._ready[inbox] = None
            self._condition.notify()

    def wait(self, timeout_s: float | None = None) -> list[Inbox]:
        """Those with news since the last call; waits for the first. Empty after `timeout_s`."""
        with self._condition:
            if not self._ready:
                self._condition.wait(timeout_s)
            ready, self._ready = self._ready, {}
        return list(ready)


class Inbox:
    """The listener of one request or control call. Its mailbox can be changed while it is in use."""

    __slots__ = ("mailbox",)

    def __init__(self, mailbox: Mailbox | None = None) -> None:
        self.mailbox = mailbox or Mailbox()

    def notify(self) -> None:
        """Called on the I/O thread."""
        self.mailbox.put(self)
