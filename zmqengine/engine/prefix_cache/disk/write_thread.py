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
LOOK_S = 1.0
"""Seconds between two looks for files of other workers: one call where there are none."""
TIDY_S = 60.0
"""Seconds between two times that the directory is tidied, without a write."""
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
        self._queue: queue.SimpleQueue[tuple[int, list[HostBlock] | None]] = queue.SimpleQueue()
        # Runs of earlier generations are not written.
        self._generation = 0
        # Keys of the queued blocks, each with whether it has a checkpoint.
        self._queued: set[tuple[bytes, bool]] = set()
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
        """Queue a run, each block the parent of the next. It is readable once it is written."""
        run = list(blocks)
        self._queued.update((block.key, bool(block.form)) for block in run)
        self._queued_bytes += sum(block.bytes for block in run)
        self._queue.put((self._generation, run))

    def count_lost(self, blocks: int) -> None:
        """Count blocks that were not queued for want of room."""
        self._directory.counts[f"refused_{self._reason}" if self._is_refusing else "lost_slow_disk"] += blocks

    def has(self, key: bytes, *, with_state: bool) -> bool:
        """Whether a block, with its checkpoint or as it is, is queued."""
        return (key, True) in self._queued or (not with_state and (key, False) in self._queued)

    def clear(self) -> None:
        """Write none of the runs that are queued; one whose write has begun is written."""
        self._generation += 1
        self._queued.clear()

    def wait(self, timeout_s: float) -> None:
        """Return when something was written since the last call, or after `timeout_s`."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def close(self, timeout_s: float) -> bool:
        """Stop the thread when the queue is written, or after `timeout_s`; returns whether it was."""
        self._queue.put((0, None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _is_refusing(self) -> bool:
        return time.monotonic() - self._refused_s < REFUSED_WAIT_S

    def _run(self) -> None:
        self._directory.tidy()
        tidied_s = time.monotonic()
        while True:
            try:
                generation, blocks = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                self._directory.look()
                if time.monotonic() - tidied_s > TIDY_S:
                    self._directory.tidy()
                    tidied_s = time.monotonic()
                continue
            if blocks is None:
                return
            if generation == self._generation:
                self._write(blocks)
                self._queued.difference_update((block.key, bool(block.form)) for block in blocks)
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
        counts[f"refused_{self._reason}"] += len(blocks)
