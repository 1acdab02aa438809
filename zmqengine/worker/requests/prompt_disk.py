"""Transfers between the prefix cache in memory and on disk, bounded in each pass."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqengine.protocol.messages import Insert
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.requests.preparing import Preparation, Preparer
from zmqengine.worker.requests.restore import Restore

if TYPE_CHECKING:
    from zmqengine.engine.prompts_on_disk import PromptsOnDisk

log = logging.getLogger("zmqengine.worker")

RESTORED_TOKENS_MIN = 64
"""A shorter prompt is not looked for."""
PASS_BYTES, IDLE_PASS_BYTES = 16 << 20, 64 << 20
"""What is made arrays in a pass, while rows are stepped and while none are."""
SAVED_BYTES = 16 << 20
"""What is copied in a pass for the thread that writes while no row is stepped."""
SAVING_SHARE = 0.003
"""Of the time of steps, for copying while rows are stepped. What the writing thread and the system then do with it
takes several times as long: with 0.02, rows that decode on two cores lost 12 % of their speed."""
_CREDIT_S_MAX = 0.05


class PromptDisk:
    """Restores what requests need before they wait for a row, and saves what was read. Without `disk` it does nothing.

    What is restored stays in memory until its request's row begins. No more does than half of what `room_bytes` says,
    or than one request needs.
    """

    def __init__(self, disk: PromptsOnDisk | None, preparer: Preparer, room_bytes: Callable[[], int]) -> None:
        self._disk = disk
        self._preparer = preparer
        self._room_bytes = room_bytes
        self._waiting: deque[LiveRequest] = deque()
        self._making: deque[LiveRequest] = deque()
        self._held: dict[LiveRequest, int] = {}
        self._credit_s = 0.0

    # --- restoring ---

    def preparation(self, insert: Insert, scope: str) -> Preparation | None:
        """Looks for a prompt, if it is long enough for that; the request knows then what to `take`."""
        disk = self._disk
        if disk is None or len(insert.prompt) + len(insert.emitted) <= RESTORED_TOKENS_MIN:
            return None
        salt = disk.salt(scope)

        def look() -> Callable[[LiveRequest], None]:
            # Imported here: most workers that start quickly, those without MLX, never need it.
            import numpy as np

            ids = np.array([*insert.prompt, *insert.emitted], np.uint32)
            plan = disk.plan(ids, salt)

            def apply(request: LiveRequest) -> None:
                request.restore = Restore(plan, ids) if plan.keys else None

            return apply

        return _never_failing(look)

    def take(self, request: LiveRequest) -> bool:
        """Whether this request, which has been prepared, has to be restored first; then `restored` gives it back."""
        restore = request.restore
        if restore is None or (restore.is_read and not restore.blocks):
            return False
        (self._making if restore.is_read else self._waiting).append(request)
        return True

    def restored(self, is_busy: bool) -> list[LiveRequest]:
        """Go on, for as long as a pass has time for; returns the requests that have all they can have."""
        done: list[LiveRequest] = []
        if self._disk is None:
            return done
        self._read_next()
        if self._making:
            request = self._making[0]
            assert request.restore is not None
            bytes_max = PASS_BYTES if is_busy else IDLE_PASS_BYTES
            self._disk.restore(request.restore.blocks, bytes_max, request.restore)
            if not request.restore.blocks:
                done.append(self._making.popleft())
        return done

    def forget(self, request: LiveRequest) -> None:
        """The request's row has begun with what was restored, or lost its place, or has ended."""
        if self._disk is not None and request.restore is not None:
            self._disk.release(request.restore)
        request.restore = None
        self._held.pop(request, None)
        for line in (self._waiting, self._making):
            if request in line:
                line.remove(request)

    @property
    def is_restoring(self) -> bool:
        """Whether a request waits for the next pass to go on."""
        return bool(self._making)

    def _read_next(self) -> None:
        while self._waiting:
            restore = self._waiting[0].restore
            assert restore is not None
            held = sum(self._held.values())
            if held and held + restore.plan.bytes > self._room_bytes() // 2:
                return
            request = self._waiting.popleft()
            self._held[request] = restore.plan.bytes
            self._preparer.start(request, self._reading(restore))

    def _reading(self, restore: Restore) -> Preparation:
        disk = self._disk
        assert disk is not None

        def read() -> Callable[[LiveRequest], None]:
            restore.blocks = disk.read(restore.plan, restore.tokens)
            return lambda request: None

        restore.is_read = True
        return _never_failing(read)

    # --- saving ---

    @property
    def has_work(self) -> bool:
        """Whether there is something to save."""
        return self._disk is not None and self._disk.has_work

    def save(self, step_s: float | None) -> None:
        """Copy a little of what was read. `step_s` is how long the pass's step took, None if it made none."""
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

    def note_reading(self, tokens_per_s: float | None) -> None:
        """How fast the model reads prompts, once that is known."""
        if self._disk is not None and tokens_per_s is not None:
            self._disk.note_reading(tokens_per_s)

    def save_all(self, seconds: float, goes_on: Callable[[], bool]) -> None:
        """Save what is left while `goes_on`, for so many seconds at the most."""
        if self._disk is not None:
            self._disk.close(seconds, goes_on)

    def numbers(self) -> dict[str, int]:
        """For `status`."""
        if self._disk is None:
            return {}
        return {f"prompt_disk_{name}": number for name, number in self._disk.numbers().items()}


def _never_failing(look: Preparation) -> Preparation:
    """Log a failure of the disk: it costs time and no request."""

    def prepare() -> Callable[[LiveRequest], None]:
        try:
            return look()
        except Exception as error:
            log.error("a prompt could not be restored from disk", exc_info=error)
            return lambda request: None

    return prepare
