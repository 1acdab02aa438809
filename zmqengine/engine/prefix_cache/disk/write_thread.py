"""Thread that writes blocks to disk. It gets bytes and never touches MLX."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from zmqengine.engine.prefix_cache.disk.block_file import HostBlock
from zmqengine.engine.prefix_cache.disk.directory import Directory, Refused

log = logging.getLogger("zmqengine.engine")

QUEUE_BYTES_MAX = 128 << 20
"""Maximum bytes of host memory that wait to be written: two files."""
TIDY_S = 60.0
"""Seconds without a write after which the directory is tidied."""
REASONS = ("room", "daily_writes", "error")
REFUSED_WAIT_S = 60.0
"""Seconds from a failed write to the next attempt."""


class Writer:
    """Queue of runs, written in order by a thread of its own. One other thread calls it.

    `wake` is called by the thread when there is room for more. Unwritten blocks are counted in the directory's
    `counts`: by the reason of the last refusal, or as lost to a slow disk.
    """

    def __init__(self, directory: Directory, wake: Callable[[], None] = lambda: None) -> None:
        self._directory = directory
        self._wake = wake
        self._progress = threading.Event()
        self._queue: queue.SimpleQueue[list[HostBlock] | None] = queue.SimpleQueue()
        self._queued_bytes = self._done_bytes = 0
        self._refused_s = -math.inf
        self._reason = ""
        directory.counts.update({f"refused_{reason}": 0 for reason in REASONS}, lost_slow_disk=0)
        self._thread = threading.Thread(target=self._run, name="prompt-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._queued_bytes - self._done_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that may be queued now: none for a while after a write failed."""
        return 0 if self._is_refusing else QUEUE_BYTES_MAX - self.waiting_bytes

    def write(self, blocks: Sequence[HostBlock]) -> None:
        """Queue a run, each block the parent of the next. It is readable from now on."""
        run = list(blocks)
        self._directory.announce(run)
        self._queued_bytes += sum(block.bytes for block in run)
        self._queue.put(run)

    def count_lost(self, blocks: int) -> None:
        """Count blocks that were not queued for want of room."""
        self._directory.counts[f"refused_{self._reason}" if self._is_refusing else "lost_slow_disk"] += blocks

    def wait(self, timeout_s: float) -> None:
        """Return when something was written since the last call, or after `timeout_s`."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread when the queue is written, or after `timeout_s`; returns whether it was."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _is_refusing(self) -> bool:
        return time.monotonic() - self._refused_s < REFUSED_WAIT_S

    def _run(self) -> None:
        self._directory.tidy()
        while True:
            try:
                blocks = self._queue.get(timeout=TIDY_S)
            except queue.Empty:
                self._directory.tidy()
                continue
            if blocks is None:
                return
            if self._directory.is_announced(blocks):
                self._write(blocks)
            self._done_bytes += sum(block.bytes for block in blocks)
            self._progress.set()
            self._wake()

    def _write(self, blocks: list[HostBlock]) -> None:
        counts = self._directory.counts
        if not self._is_refusing:
            try:
                self._directory.write(blocks)
                return
            except Refused as refused:
                self._refused_s, self._reason = time.monotonic(), refused.reason
                if not counts[f"refused_{self._reason}"]:
                    log.warning("prompts are not written to disk", extra={"reason": str(refused)})
        self._directory.retract(blocks)
        counts[f"refused_{self._reason}"] += len(blocks)
