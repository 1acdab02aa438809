"""Transfers between the prefix cache in memory and on disk, bounded in every pass."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zmqengine.protocol.messages import Insert
from zmqengine.worker.requests.live_request import LiveRequest, Prepared, Restore
from zmqengine.worker.requests.preparing import Preparer

if TYPE_CHECKING:
    from zmqengine.engine.disk_cache import DiskCache

log = logging.getLogger("zmqengine.worker")

RESTORED_TOKENS_MIN = 64
"""A prompt of at most one block of the prefix cache is not looked up."""
PASS_BYTES, IDLE_PASS_BYTES = 16 << 20, 64 << 20
"""Bytes that one pass turns into MLX arrays, while rows are stepped and while none are."""
SAVED_BYTES = 16 << 20
"""Bytes that one pass copies for the writing thread while no row is stepped."""
SAVING_SHARE = 0.003
"""Share of the steps' time for copying while rows are stepped. What the writing thread and the system then do with it
takes several times as long: with 0.02, rows that decode on two cores lost 12 % of their speed."""
_CREDIT_S_MAX = 0.05
"""Bound on the seconds that one pass copies while rows are stepped."""
_FAILED = "a prompt could not be restored from disk"


class PromptDisk:
    """Restores prompts before their requests are queued, and saves prompts that were prefilled. Idle without `disk`.

    Restored blocks stay in memory until their request's row begins its prefill. Together they take at most half of
    `room_bytes()`, or what one request needs.
    """

    def __init__(self, disk: DiskCache | None, preparer: Preparer, room_bytes: Callable[[], int]) -> None:
        self._disk = disk
        self._preparer = preparer
        self._room_bytes = room_bytes
        self._restores: dict[LiveRequest, Restore] = {}
        self._to_read: deque[LiveRequest] = deque()
        self._to_make: deque[LiveRequest] = deque()
        self._held_bytes: dict[LiveRequest, int] = {}
        self._credit_s = 0.0

    # --- restoring: looked up and read on threads, made arrays by the actor, a piece a pass ---

    def look_up(self, insert: Insert, scope: str) -> Callable[[], Restore | None] | None:
        """A search for a prompt on disk, to run on a thread; None for prompts that are too short."""
        disk = self._disk
        if disk is None or len(insert.prompt) + len(insert.emitted) <= RESTORED_TOKENS_MIN:
            return None
        salt = disk.salt(scope)

        def look_up() -> Restore | None:
            # Imported here: workers without MLX, which start quickly, never need it.
            import numpy as np

            try:
                ids = np.array([*insert.prompt, *insert.emitted], np.uint32)
                plan = disk.plan(ids, salt)
            except Exception as error:
                log.error(_FAILED, exc_info=error)
                return None
            return None if plan is None else Restore(plan, ids)

        return look_up

    def take(self, request: LiveRequest, restore: Restore | None) -> bool:
        """Whether a prepared request has to be restored first; `restored` returns it then."""
        if restore is None or (restore.is_read and not restore.blocks):
            return False
        self._restores[request] = restore
        (self._to_make if restore.is_read else self._to_read).append(request)
        return True

    def restored(self, is_busy: bool) -> list[LiveRequest]:
        """Continue for as long as a pass may take; returns the requests whose blocks are all in memory."""
        done: list[LiveRequest] = []
        if self._disk is None:
            return done
        self._start_reading()
        if self._to_make:
            request = self._to_make[0]
            restore = self._restores[request]
            self._disk.restore(restore.blocks, PASS_BYTES if is_busy else IDLE_PASS_BYTES, restore)
            if not restore.blocks:
                done.append(self._to_make.popleft())
        return done

    def forget(self, request: LiveRequest) -> None:
        """Release a request's restored blocks: its row has begun with them, or it has ended."""
        restore = self._restores.pop(request, None)
        if self._disk is not None and restore is not None:
            self._disk.release(restore)
        self._held_bytes.pop(request, None)
        for line in (self._to_read, self._to_make):
            if request in line:
                line.remove(request)

    @property
    def is_restoring(self) -> bool:
        """Whether the next pass would make arrays of a request's blocks."""
        return bool(self._to_make)

    def _start_reading(self) -> None:
        while self._to_read:
            restore = self._restores[self._to_read[0]]
            held_bytes = sum(self._held_bytes.values())
            if held_bytes and held_bytes + restore.plan.bytes > self._room_bytes() // 2:
                return
            request = self._to_read.popleft()
            self._held_bytes[request] = restore.plan.bytes
            self._preparer.start(request, partial(self._read, restore))

    def _read(self, restore: Restore) -> Prepared:
        """Read a request's blocks, on a thread. A failure leaves none: it costs time and no request."""
        assert self._disk is not None
        try:
            blocks = self._disk.read(restore.plan, restore.tokens)
        except Exception as error:
            log.error(_FAILED, exc_info=error)
            blocks = deque()
        return Prepared(restore=replace(restore, blocks=blocks, is_read=True))

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
        """Take the measured speed of prefill: blocks that would come back slower are neither restored nor written."""
        if self._disk is not None and tokens_per_s is not None:
            self._disk.note_prefill(tokens_per_s)

    def save_all(self, seconds: float, goes_on: Callable[[], bool]) -> None:
        """Save the rest, for at most `seconds` and only while `goes_on()`."""
        if self._disk is not None:
            self._disk.close(seconds, goes_on)

    def numbers(self) -> dict[str, int]:
        """Numbers for `status`, by name."""
        if self._disk is None:
            return {}
        return {f"prompt_disk_{name}": number for name, number in self._disk.numbers().items()}
