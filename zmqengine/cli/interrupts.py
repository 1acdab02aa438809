"""Ctrl-C as a request instead of an exception."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def ctrl_c_calls(action: Callable[[], object]) -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C calls `action`, the second raises KeyboardInterrupt."""
    interrupt = Interrupt()

    def pressed(number: int, frame: FrameType | None) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True
        # On a thread of its own: the code that was interrupted may hold a lock that the action needs.
        threading.Thread(target=action, daemon=True).start()

    earlier = signal.signal(signal.SIGINT, pressed)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, earlier)
