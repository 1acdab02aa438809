"""Wakes the actor out of its poll, from a signal handler or from the control thread."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """A pipe whose read end the actor polls. `wake()` never blocks and is safe in a signal handler."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """File descriptor to poll for reading."""
        return self._reader

    @property
    def signal_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal wakes the actor even if another thread receives it."""
        return self._writer

    def wake(self) -> None:
        """Wake the actor, now or at its next poll."""
        # With a full pipe the actor wakes anyway; with a closed one it is gone.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._writer, b"!")

    def clear(self) -> None:
        """Drain the pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def close(self) -> None:
        """Free the pipe. Idempotent: a later `wake` must not write to another file with the same number."""
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        for fd in (reader, writer):
            if fd >= 0:
                os.close(fd)
