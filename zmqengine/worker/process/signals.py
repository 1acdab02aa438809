"""Signals as bytes on a socket, for a poller."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """A non-blocking socket that gets the number of each of these signals as a byte.

    Inside the context their handlers do nothing else; earlier handlers are restored at its end. For the main thread.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        # In this order, a signal between the two acts as before instead of being lost.
        earlier_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(earlier_fd)
            for number, handler in earlier.items():
                signal.signal(number, handler)
