"""The thread that writes blocks to disk. It gets bytes of the host and never touches MLX."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.disk.host_block import HostBlock
from zmqengine.engine.prefix_cache.disk.room import Refused
from zmqengine.engine.prefix_cache.disk.unwritten import Unwritten

log = logging.getLogger("zmqengine.engine")

QUEUE_BYTES_MAX = 128 << 20
TIDY_S = 60.0
REASONS = ("room", "daily_writes", "error", "waiting")
"""Why a block was not written: those of `Refused`, and that one was refused a short time ago."""
REFUSED_WAIT_S = 60.0
"""After a write was refused, until the next one is tried."""


class Writer:
    """Writes runs in the order in which they came. All but the thread itself is called from one other thread.

    `ring` is called by the thread when there is room for more. What it is given leaves `unwritten` when it is written.
    """

    def __init__(self, directory: Directory, ring: Callable[[], None] = lambda: None) -> None:
        self.refused: Counter[str] = Counter()
        self.unwritten = Unwritten()
        self._directory = directory
        self._ring = ring
        self._progress = threading.Event()
        self._queue: queue.SimpleQueue[list[HostBlock] | None] = queue.SimpleQueue()
        self._taken_bytes = self._done_bytes = 0
        self._refused_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="prompt-writer", daemon=True)
        self._thread.start()

    @property
    def is_refusing(self) -> bool:
        """Whether a write failed a short time ago, so that the next one would as well."""
        return time.monotonic() - self._refused_s < REFUSED_WAIT_S

    @property
    def waiting_bytes(self) -> int:
        """Blocks that were handed over and are not written yet."""
        return self._taken_bytes - self._done_bytes

    @property
    def room_bytes(self) -> int:
        """How much more may be handed over now."""
        return QUEUE_BYTES_MAX - self.waiting_bytes

    def write(self, blocks: Sequence[HostBlock]) -> None:
        """Hand over a run, each block the parent of the next."""
        self._taken_bytes += sum(block.bytes for block in blocks)
        self._queue.put(list(blocks))

    def wait(self, timeout_s: float) -> None:
        """Return when something has been written since the last call, or after `timeout_s`."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def close(self, timeout_s: float) -> bool:
        """End when all that was handed over is written, or after `timeout_s`; returns whether it was."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
            self._write(blocks)
            self.unwritten.remove(blocks)
            self._done_bytes += sum(block.bytes for block in blocks)
            self._progress.set()
            self._ring()

    def _write(self, blocks: list[HostBlock]) -> None:
        if self.is_refusing:
            self.refused["waiting"] += len(blocks)
            return
        try:
            self._directory.write(blocks)
        except Refused as refused:
            self._refused_s = time.monotonic()
            if not self.refused[refused.reason]:
                log.warning("prompts are not kept on disk", extra={"reason": str(refused)})
            self.refused[refused.reason] += len(blocks)
