"""Threads for images: few, as each may hold a decoded one of 150 MB."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 2
T = TypeVar("T")


class ImageThreads:
    """Threads that start with the first work, in a forked child anew."""

    def __init__(self) -> None:
        self._pid = 0
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread, after earlier work."""
        if self._threads is None or self._pid != os.getpid():
            self._pid, self._threads = os.getpid(), ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        return self._threads.submit(work)


IMAGE_THREADS = ImageThreads()
"""The threads that all clients of a process share."""
