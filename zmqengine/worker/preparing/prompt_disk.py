"""Transfers between the prefix cache in memory and on disk, bounded in every pass."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from zmqengine.protocol.messages import Insert
from zmqengine.worker.preparing.preparer import Preparer
from zmqengine.worker.requests.live_request import LiveRequest, Prepared, Restore
from zmqengine.worker.requests.ticket import Ticket
from zmqengine.worker.scheduler.policy import ServiceOrder

if TYPE_CHECKING:
    from zmqengine.engine.disk_cache import DiskCache

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
LOOK_UP_S = 1.0
"""Maximum seconds of a look-up: a working disk takes milliseconds."""
READ_S = 2.0
"""Maximum seconds of a read beyond the time of the prefill that it saves: time for a sleeping disk to wake up and a
busy one to answer."""
_FAILED = "a prompt could not be restored from disk"


@dataclass(slots=True)
class _Wanted:
    """The restore of one prompt: looked up, found, read, converted to arrays, and held for its row.

    `ticket`: its position in the order of reads. `until_s`: end of the time for a look-up or a read.
    """

    stage: Literal["sought", "found", "read", "made", "held"]
    until_s: float | None = None
    restore: Restore | None = None
    ticket: Ticket | None = None


class PromptDisk:
    """Restores prompts from disk before their rows begin, and saves prompts that were prefilled. Idle without `disk`.

    A prompt is looked up before its request is queued. While the prompt waits for room in memory, the request is in the
    queue: if its turn comes, the prompt is prefilled. Prompts are read in an order of service of their own; during the
    read the scheduler sets the request aside if its turn comes (`awaits`). No request waits for a hanging disk: after a
    time-out its prompt is prefilled.

    Restored blocks stay in memory until their request's row begins its prefill. Together they take at most half of
    `room_bytes()`, or what one request needs. A request of a better class takes the room of one of a worse class
    without a row, whose prompt is then prefilled.
    """

    def __init__(
        self,
        disk: DiskCache | None,
        preparer: Preparer,
        room_bytes: Callable[[], int],
        image_token: int = -1,
    ) -> None:
        self._disk = disk
        self._image_token = image_token
        self._preparer = preparer
        self._room_bytes = room_bytes
        self._wanted: dict[LiveRequest, _Wanted] = {}
        self._order = ServiceOrder()
        self._by_ticket: dict[Ticket, LiveRequest] = {}
        self._to_make: deque[LiveRequest] = deque()
        self._aside: dict[LiveRequest, None] = {}
        self._prefill_tokens_per_s: float | None = None
        self._credit_s = 0.0

    # --- restore: look-up and read on threads, conversion to arrays by the actor, a piece a pass ---

    def seek(self, request: LiveRequest, now_s: float) -> bool:
        """Start the look-up of a new request's prompt; False if the prompt is short or the disk hangs.

        Otherwise `advance` returns the request when it may be queued.
        """
        disk, insert = self._disk, request.insert
        if disk is None or not isinstance(insert, Insert):
            return False
        if len(insert.prompt) + len(insert.emitted) <= RESTORED_TOKENS_MIN or self._hangs:
            return False
        salt = disk.salt(request.cache_scope)
        images, token = request.images, self._image_token

        def look_up() -> Prepared:
            # Imported here: workers without MLX start fast and never need it.
            from zmqengine.engine.image_names import named

            try:
                ids = named([*insert.prompt, *insert.emitted], images, token)
                plan = disk.plan(ids, salt)
            except Exception as error:
                log.error(_FAILED, exc_info=error)
                plan = None
            return Prepared(restore=None if plan is None else Restore(plan, ids))

        self._wanted[request] = _Wanted("sought", until_s=now_s + LOOK_UP_S)
        self._aside[request] = None
        self._preparer.start(request, look_up, "look up")
        return True

    def receive(self, request: LiveRequest, prepared: Prepared) -> bool:
        """Take the result of a look-up or a read; False if the preparation was another one."""
        wanted = self._wanted.get(request)
        if wanted is None:
            return False
        wanted.until_s = None
        restore = wanted.restore = prepared.restore
        if restore is None or (restore.is_read and not restore.blocks):
            del self._wanted[request]
        elif restore.is_read:
            wanted.stage = "made"
            self._to_make.append(request)
        else:
            wanted.stage = "found"
            wanted.ticket = replace(request.ticket, phase="new", prompt_tokens=0)
            self._by_ticket[wanted.ticket] = request
            self._order.enqueue(wanted.ticket, request.ticket.waiting_since_s)
        return True

    def advance(self, now_s: float, *, is_busy: bool) -> list[LiveRequest]:
        """Continue restores within a pass's bounds; returns the requests set aside that may be queued again."""
        if self._disk is None:
            return []
        self._give_up(now_s)
        self._start_reading(now_s)
        if self._to_make:
            request = self._to_make[0]
            wanted = self._wanted[request]
            restore = wanted.restore
            assert restore is not None
            self._disk.restore(restore.blocks, PASS_BYTES if is_busy else IDLE_PASS_BYTES, restore)
            if not restore.blocks:
                self._to_make.popleft()
                wanted.stage = "held"
        ready = [request for request in self._aside if not self.awaits(request)]
        for request in ready:
            del self._aside[request]
        return ready

    def awaits(self, request: LiveRequest) -> bool:
        """Whether a request's prompt is being read from disk, or waits for the read of another with the same
        beginning."""
        wanted = self._wanted.get(request)
        if wanted is None or wanted.stage == "held":
            return False
        return wanted.stage != "found" or any(
            other.stage in ("read", "made") or (other.stage == "held" and owner.phase == "running")
            for owner, other in self._wanted.items()
        )

    def set_aside(self, request: LiveRequest) -> None:
        """Note a request that has left the queue, until `advance` returns it."""
        self._aside[request] = None

    def forget(self, request: LiveRequest) -> None:
        """Release a request's restored blocks: its row has begun with them, or it has ended."""
        self._drop(request)
        self._aside.pop(request, None)

    @property
    def is_restoring(self) -> bool:
        """Whether the next pass would restore blocks to arrays."""
        return bool(self._to_make)

    def next_deadline_s(self) -> float | None:
        """Time of the next time-out of a look-up or a read, or None."""
        due = [wanted.until_s for wanted in self._wanted.values() if wanted.until_s is not None]
        return min(due, default=None)

    @property
    def _hangs(self) -> bool:
        return self._preparer.is_stuck("look up") or self._preparer.is_stuck("read")

    def _drop(self, request: LiveRequest) -> None:
        wanted = self._wanted.pop(request, None)
        if wanted is None:
            return
        if self._disk is not None and wanted.restore is not None:
            self._disk.release(wanted.restore)
        if wanted.ticket is not None:
            self._order.withdraw(wanted.ticket)
            self._by_ticket.pop(wanted.ticket, None)
        if request in self._to_make:
            self._to_make.remove(request)

    def _give_up(self, now_s: float) -> None:
        """Give up restores past their time-out, and all others once the disk hangs; these prompts are prefilled."""
        late = [
            request
            for request, wanted in self._wanted.items()
            if wanted.until_s is not None and now_s >= wanted.until_s
        ]
        for request in late:
            log.warning(
                "the disk takes too long: a prompt is prefilled instead", extra={"request": request.id}
            )
            self._preparer.give_up(request)
            self._drop(request)
        if late and self._hangs:
            for request in [
                one for one, wanted in self._wanted.items() if wanted.stage in ("sought", "found")
            ]:
                self._preparer.cancel(request)
                self._drop(request)

    def _start_reading(self, now_s: float) -> None:
        while self._preparer.free_threads("read") and (ticket := self._order.first(now_s)) is not None:
            request = self._by_ticket[ticket]
            wanted = self._wanted[request]
            restore = wanted.restore
            assert restore is not None
            if request.phase == "running":
                # The request's turn came first: its prompt is being prefilled.
                self._drop(request)
                continue
            if not self._make_room(request, restore.plan.bytes):
                return
            self._order.start(ticket, now_s)
            self._order.charge(ticket, 0, restore.plan.tokens)
            self._order.withdraw(ticket)
            wanted.stage = "read"
            rate = self._prefill_tokens_per_s
            wanted.until_s = now_s + READ_S + (restore.plan.tokens / rate if rate else 0.0)
            self._preparer.start(request, partial(self._read, restore), "read")

    def _make_room(self, request: LiveRequest, needed_bytes: int) -> bool:
        """Whether there is room in memory for a request's blocks, at the cost of worse classes if need be."""
        held = {
            owner: wanted.restore.plan.bytes
            for owner, wanted in self._wanted.items()
            if wanted.restore is not None and wanted.stage in ("read", "made", "held")
        }
        worse = sorted(
            (
                one
                for one in held
                if one.phase != "running" and one.ticket.priority_class > request.ticket.priority_class
            ),
            key=lambda one: (one.ticket.priority_class, one.ticket.arrival),
        )
        while held and sum(held.values()) + needed_bytes > self._room_bytes() // 2:
            if not worse:
                return False
            last = worse.pop()
            del held[last]
            self._preparer.cancel(last)
            self._drop(last)
        return True

    def _read(self, restore: Restore) -> Prepared:
        """Read a request's blocks, on a thread. A failure returns none: the request continues with prefill."""
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
