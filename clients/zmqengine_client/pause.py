"""The pause between two looks at a worker."""

from __future__ import annotations

import asyncio


class Pause:
    """A pause that news ends early, also news from before it."""

    def __init__(self) -> None:
        self._news = asyncio.Event()

    def end(self) -> None:
        """End this pause, or the next one at its start."""
        self._news.set()

    async def last(self, seconds: float) -> None:
        """Wait this long at most."""
        # Not wait_for: before Python 3.12 it can lose a cancellation, and with it the end of the task.
        timer = asyncio.get_running_loop().call_later(seconds, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
