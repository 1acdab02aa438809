"""Transfers between the prefix cache in memory and on disk, bounded in every pass."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zmqengine.protocol.messages import Insert
from zmqengine.worker.preparing.preparer import Preparation, Preparer
from zmqengine.worker.requests.live_request import LiveRequest, Prepared

if TYPE_CHECKING:
    import numpy as np

    from zmqengine.engine.disk_cache import DiskCache, RestorePlan

log = logging.getLogger("zmqengine.worker")

RESTORED_TOKENS_MIN = 64
"""Least tokens of a prompt for a look-up on disk: more than one block of the prefix cache."""
PASS_BYTES, IDLE_PASS_BYTES = 16 << 20, 64 << 20
"""Bytes that one pass restores to MLX arrays, with and without rows in the engine."""
SAVED_BYTES = 16 << 20
"""Bytes that one pass copies for the writing thread without rows in the engine."""
SAVING_SHARE = 0.003
"""Share of the steps' time for copies while rows are in the engine. The work of the writing thread and the system on
them takes several times as long: with 0.02, rows in decode on two cores lost 12 % of their speed."""
_CREDIT_S_MAX = 0.05
"""Bound on the seconds that one pass copies while rows are stepped."""
READ_S = 2.0
"""Maximum seconds of a read beyond the time of the prefill that it saves: time for a sleeping disk to wake up and a
busy one to answer."""


@dataclass(eq=False, slots=True)
class _Restore:
    """The restore of one prompt. `blocks`: None until they are read, empty once they are in memory.

    `until_s`: end of the time for the read. `is_running`: whether a thread reads.
    """

    request: LiveRequest
    until_s: float
    blocks: deque[Any] | None = None
    is_running: bool = False


class PromptDisk:
    """Restores prompts from disk before their rows begin, and saves prompts that were prefilled. Idle without `disk`.

    When the turn of a request comes and blocks of its prompt are on disk, the scheduler gives it away: a thread reads
    them, the actor moves them to memory, a piece a pass, and the request is queued again. One prompt is read at a time,
    each once; others with blocks on disk wait for it. No request waits for a hanging disk: after a time-out its prompt
    is prefilled, and so are all others until the read returns.

    Restored blocks are held in memory until their request's row begins, or until the next prompt is read.
    """

    def __init__(self, disk: DiskCache | None, preparer: Preparer, image_token: int = -1) -> None:
        self._disk = disk
        self._image_token = image_token
        self._preparer = preparer
        self._restore: _Restore | None = None
        # A read that nobody waits for any more.
        self._abandoned: _Restore | None = None
        self._tried: set[LiveRequest] = set()
        self._aside: dict[LiveRequest, None] = {}
        self._prefill_tokens_per_s: float | None = None
        self._credit_s = 0.0

    # --- restore: read on a thread, moved to memory by the actor ---

    def takes(self, request: LiveRequest, now_s: float) -> bool:
        """Whether a request's prompt is read from disk first, now or after another one. `advance` returns it."""
        if self._disk is None or request in self._tried or not isinstance(request.insert, Insert):
            return False
        if self._abandoned is not None and self._abandoned.is_running:
            return False
        planned = self._plan(request.insert, request)
        if planned is None:
            return False
        if not self._is_restoring:
            if self._restore is not None:
                self.release(self._restore.request)
            self._start(request, *planned, now_s)
        self._aside[request] = None
        return True

    def _plan(self, insert: Insert, request: LiveRequest) -> tuple[RestorePlan, np.ndarray] | None:
        if len(insert.prompt) + len(insert.emitted) <= RESTORED_TOKENS_MIN or insert.prefill_keep is not None:
            return None
        # Imported here: workers without MLX start fast and never need it.
        from zmqengine.engine.image_names import named

        assert self._disk is not None
        ids = named([*insert.prompt, *insert.emitted], request.images, self._image_token)
        plan = self._disk.plan(ids, self._disk.salt(request.cache_scope))
        return None if plan is None else (plan, ids)

    def _start(self, request: LiveRequest, plan: RestorePlan, ids: np.ndarray, now_s: float) -> None:
        rate = self._prefill_tokens_per_s
        restore = _Restore(request, now_s + READ_S + (plan.tokens / rate if rate else 0.0))
        self._tried.add(request)
        self._restore = restore
        self._preparer.start(request, self._reading(restore, plan, ids))

    def _reading(self, restore: _Restore, plan: RestorePlan, ids: np.ndarray) -> Preparation:
        disk = self._disk
        assert disk is not None

        def read() -> Prepared:
            restore.is_running = True
            try:
                return Prepared(blocks=disk.read(plan, ids))
            except Exception as error:
                log.error("a prompt could not be restored from disk", exc_info=error)
                return Prepared(blocks=deque())
            finally:
                restore.is_running = False

        return read

    def receive(self, request: LiveRequest, blocks: deque[Any]) -> None:
        """Take the blocks that were read for a request."""
        if self._restore is not None and self._restore.request is request:
            self._restore.blocks = blocks

    def advance(self, now_s: float, *, is_busy: bool) -> list[LiveRequest]:
        """Continue the restore within a pass's bounds; returns the requests that may be queued again."""
        restore = self._restore
        if restore is not None and restore.blocks is None and now_s >= restore.until_s:
            log.warning(
                "the disk takes too long: a prompt is prefilled instead",
                extra={"request": restore.request.id},
            )
            self.release(restore.request)
        elif restore is not None and restore.blocks:
            assert self._disk is not None
            self._disk.restore(restore.blocks, PASS_BYTES if is_busy else IDLE_PASS_BYTES, restore)
        if self._is_restoring:
            return []
        ready, self._aside = list(self._aside), {}
        return ready

    def release(self, request: LiveRequest) -> None:
        """End the restore of a request and release its blocks: its row has begun, or it waits no longer for them."""
        restore = self._restore
        if restore is None or restore.request is not request:
            return
        assert self._disk is not None
        self._preparer.cancel(request)
        self._disk.release(restore)
        self._restore, self._abandoned = None, restore

    def forget(self, request: LiveRequest) -> None:
        """Forget a request that has ended."""
        self.release(request)
        self._tried.discard(request)
        self._aside.pop(request, None)

    @property
    def _is_restoring(self) -> bool:
        return self._restore is not None and (self._restore.blocks is None or bool(self._restore.blocks))

    @property
    def is_restoring(self) -> bool:
        """Whether the next pass would move blocks to memory."""
        return self._restore is not None and bool(self._restore.blocks)

    def next_deadline_s(self) -> float | None:
        """Time of the time-out of the read, or None."""
        restore = self._restore
        return restore.until_s if restore is not None and restore.blocks is None else None

    # --- saving ---

    @property
    def has_work(self) -> bool:
        """Whether there are prompts to save."""
        return self._disk is not None and self._disk.has_work

    def save(self, step_s: float | None) -> None:
        """Copy some prompts for the writing thread. `step_s`: seconds of the pass's step, None if it made none."""
        if self._disk is None or not self._disk.has_work:
            return
        if step_s is None:
            self._disk.save(SAVED_BYTES)
            return
        self._credit_s = min(_CREDIT_S_MAX, self._credit_s + SAVING_SHARE * step_s)
        while self._credit_s > 0 and self._disk.has_work:
            started_s = time.perf_counter()
            self._disk.save(1)
            self._credit_s -= time.perf_counter() - started_s

    def note_prefill(self, tokens_per_s: float | None) -> None:
        """Take the measured speed of prefill: blocks whose restore would take longer are neither restored nor
        written."""
        if self._disk is not None and tokens_per_s is not None:
            self._prefill_tokens_per_s = tokens_per_s
            self._disk.note_prefill(tokens_per_s)

    def save_all(self, seconds: float, goes_on: Callable[[], bool]) -> None:
        """Save all remaining prompts, for at most `seconds` and only while `goes_on()`."""
        if self._disk is not None:
            self._disk.close(seconds, goes_on)

    def numbers(self) -> dict[str, int]:
        """Numbers for `status`, by name."""
        if self._disk is None:
            return {}
        return {f"prompt_disk_{name}": number for name, number in self._disk.numbers().items()}
