"""What comes from disk comes before a row, a piece a pass, and never costs a request."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.worker.harness import FrontEnd, Harness
from zmqengine.engine.disk_cache import RestorePlan
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
from zmqengine.worker.preparing import prompt_disk

LONG = list(range(5, 105))
BLOCK_BYTES = 1 << 20


class Block(NamedTuple):
    """Stands for one of a `HostBlock`."""

    bytes: int = BLOCK_BYTES


class FakeDisk:
    """Has `count` blocks for every prompt. Its threads wait at `gate` before they read."""

    def __init__(self) -> None:
        self.count = 3
        self.plan_bytes = 3 * BLOCK_BYTES
        self.gate = threading.Event()
        self.gate.set()
        self.look_up_gate = threading.Event()
        self.look_up_gate.set()
        self.looked_up = 0
        self.reads: list[int] = []
        self.failing = False
        self.restored: list[int] = []
        self.awaited: set[Hashable] = set()
        self.unsaved = 0
        self.saved: list[int] = []
        self.closed_with: float | None = None
        self.tokens_per_s = 0.0

    @property
    def reading(self) -> int:
        return len(self.reads)

    def salt(self, scope: str) -> bytes:
        return scope.encode()

    def plan(self, tokens: np.ndarray, salt: bytes) -> RestorePlan | None:
        self.looked_up += 1
        assert self.look_up_gate.wait(60)
        if self.failing:
            raise RuntimeError("a bug")
        return RestorePlan([b"key"] * self.count, self.plan_bytes, 64) if self.count else None

    def read(self, plan: RestorePlan, tokens: np.ndarray) -> deque[Block]:
        self.reads.append(int(tokens[0]))
        assert self.gate.wait(60)
        return deque(Block() for _ in plan.keys)

    def restore(self, blocks: deque[Block], bytes_max: int, awaited_by: Hashable) -> None:
        blocks.popleft()
        self.restored.append(len(blocks))
        self.awaited.add(awaited_by)

    def release(self, awaited_by: Hashable) -> None:
        self.awaited.discard(awaited_by)

    @property
    def has_work(self) -> bool:
        return self.unsaved > 0

    def save(self, bytes_max: int) -> int:
        self.unsaved -= 1
        self.saved.append(bytes_max)
        return bytes_max

    def note_prefill(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def close(self, seconds: float = 0.0, goes_on: Callable[[], bool] = lambda: True) -> None:
        self.closed_with = seconds

    def numbers(self) -> dict[str, int]:
        return {"blocks": 7}


class DiskEngine(FakeEngine):
    """A fake engine with a disk."""

    def __init__(self, **config: Any) -> None:
        super().__init__(FakeEngineConfig(**config))
        self.disk = self.fake_disk = FakeDisk()  # type: ignore[assignment]


class DiskHarness(Harness):
    """Its requests read from a fake disk."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.disk_engine = DiskEngine(**config)
        super().__init__(directory, self.disk_engine)

    @property
    def disk(self) -> FakeDisk:
        return self.disk_engine.fake_disk


@pytest.fixture
def make_disk_harness(tmp_path: Path) -> Iterator[Callable[..., DiskHarness]]:
    """Builds harnesses and closes them, whatever their disk still waits for."""
    made: list[DiskHarness] = []

    def make(**config: Any) -> DiskHarness:
        made.append(DiskHarness(tmp_path, **config))
        return made[-1]

    yield make
    for harness in made:
        harness.disk.gate.set()
        harness.disk.look_up_gate.set()
        harness.close()


@pytest.fixture
def harness(make_disk_harness: Callable[..., DiskHarness]) -> DiskHarness:
    return make_disk_harness()


def test_a_prompt_is_restored_a_piece_a_pass_before_it_gets_a_row(harness: DiskHarness) -> None:
    """Others decode meanwhile, and it has no row while anything is missing."""
    front_end = harness.front_end()
    front_end.accepted("short", max_tokens=500)
    harness.pass_()
    harness.disk.gate.clear()
    front_end.accepted("long", LONG)
    harness.run_until(lambda: harness.disk.reading)
    # The disk takes its time, the row does not wait for it.
    before = harness.actor.counters.tokens
    harness.passes(5)
    assert harness.actor.counters.tokens == before + 5
    (_, request) = harness.actor.lifecycle.live()
    assert request.phase == "preparing"
    harness.disk.gate.set()
    pieces = []
    harness.run_until(lambda: pieces.append(len(harness.disk.restored)) or request.phase == "running")
    assert harness.disk.restored == [2, 1, 0]
    assert set(pieces) >= {1, 2}, "more than one piece in a pass"


def test_what_was_restored_stays_until_its_row_has_begun(
    make_disk_harness: Callable[..., DiskHarness],
) -> None:
    """Not only until it has a row: what others read meanwhile would have it go. A request that ends gives it up."""
    harness = make_disk_harness(rows_max=1)
    front_end = harness.front_end()
    front_end.accepted("first", max_tokens=500)
    harness.pass_()
    for name in ("waits", "ends"):
        front_end.accepted(name, LONG)
    harness.run_until(lambda: len(harness.disk.awaited) == 2)
    harness.passes(3)
    assert len(harness.disk.awaited) == 2
    front_end.abort("ends")
    harness.pass_()
    assert len(harness.disk.awaited) == 1
    front_end.abort("first")
    harness.run_until(lambda: front_end.read() or front_end.ends.get("waits"))
    assert not harness.disk.awaited


def test_short_prompts_and_what_is_not_there_start_at_once(harness: DiskHarness) -> None:
    """A prompt of less than a block is not looked for; of one that is not on disk nothing is read."""
    front_end = harness.front_end()
    front_end.accepted("short")
    harness.disk.count = 0
    front_end.accepted("unknown", LONG)
    harness.run_until(lambda: front_end.read() or len(front_end.ends) == 2)
    assert harness.disk.reading == 0


def test_a_disk_that_fails_costs_no_request(harness: DiskHarness) -> None:
    """The prompt is computed instead."""
    harness.disk.failing = True
    front_end = harness.front_end()
    front_end.accepted("long", LONG)
    harness.run_until(lambda: front_end.read() or front_end.ends)
    assert [end.finish for end in front_end.ends["long"]] == ["length"]


@pytest.mark.parametrize("stage", ["waiting", "reading", "making"])
def test_a_request_that_ends_meanwhile_is_forgotten(harness: DiskHarness, stage: str) -> None:
    """Aborted while it waits for its turn, is read, or is made arrays: one answer, and the next is served."""
    front_end = harness.front_end()
    if stage != "making":
        harness.disk.gate.clear()
        if stage == "waiting":
            harness.disk.plan_bytes = 1 << 60
            front_end.accepted("before", LONG)
            harness.run_until(lambda: harness.disk.reading == 1)
    front_end.accepted("long", LONG)
    if stage == "reading":
        harness.run_until(lambda: harness.disk.reading)
    elif stage == "making":
        harness.run_until(lambda: harness.disk.restored)
    else:
        harness.passes(5)
        assert harness.disk.reading == 1, "two that are too large together are read at once"
    front_end.abort("long")
    harness.run_until(lambda: front_end.read() or front_end.ends.get("long"))
    assert [end.finish for end in front_end.ends["long"]] == ["abort"]
    if stage == "waiting":
        front_end.abort("before")
    harness.disk.gate.set()
    front_end.accepted("next", LONG)
    harness.run_until(lambda: front_end.read() or front_end.ends.get("next"))
    assert [end.finish for end in front_end.ends["next"]] == ["length"]


def ends(front_end: FrontEnd, *names: str) -> Callable[[], bool]:
    def have_ended() -> bool:
        front_end.read()
        return all(name in front_end.ends for name in names)

    return have_ended


def test_reads_that_hang_delay_nobody_else(harness: DiskHarness) -> None:
    """Neither a prompt that is not on disk, nor, once they took too long, any other; then the disk is left alone."""
    front_end = harness.front_end()
    harness.disk.gate.clear()
    front_end.accepted("hangs 0", LONG)
    front_end.accepted("hangs 1", LONG)
    harness.run_until(lambda: harness.disk.reading == 2)
    front_end.accepted("behind", LONG)
    behind, wanted = harness.actor.lifecycle.live()[-1], harness.actor.lifecycle.prompt_disk._wanted
    harness.run_until(lambda: wanted[behind].stage == "found")
    harness.disk.count = 0
    front_end.accepted("absent", LONG)
    harness.run_until(ends(front_end, "absent"))
    assert set(front_end.ends) == {"absent"}
    harness.disk.count = 3
    harness.clock.advance(prompt_disk.READ_S)
    harness.run_until(ends(front_end, "hangs 0", "hangs 1", "behind"))
    looked_up = harness.disk.looked_up
    front_end.accepted("later", LONG)
    harness.run_until(ends(front_end, "later"))
    assert (harness.disk.looked_up, harness.disk.reading) == (looked_up, 2)
    assert {end.finish for found in front_end.ends.values() for end in found} == {"length"}
    harness.disk.gate.set()
    preparer = harness.actor.lifecycle.prompt_disk._preparer
    harness.run_until(lambda: preparer.free_threads("read") == 2)
    front_end.accepted("again", LONG)
    harness.run_until(ends(front_end, "again"))
    assert harness.disk.reading == 3


def test_look_ups_that_hang_delay_a_request_once_and_for_a_bounded_time(harness: DiskHarness) -> None:
    """Those that wait for them are prefilled after a second, later ones at once."""
    front_end = harness.front_end()
    harness.disk.look_up_gate.clear()
    for number in range(3):
        front_end.accepted(f"r{number}", LONG)
    harness.run_until(lambda: harness.disk.looked_up)
    harness.passes(3)
    assert not front_end.ends
    harness.clock.advance(prompt_disk.LOOK_UP_S)
    harness.run_until(ends(front_end, "r0", "r1", "r2"))
    front_end.accepted("later", LONG)
    harness.run_until(ends(front_end, "later"))
    assert harness.disk.looked_up == 1


def test_an_urgent_request_takes_the_room_of_batch_work(
    make_disk_harness: Callable[..., DiskHarness],
) -> None:
    """A restored batch job without a row is prefilled instead; the urgent one preempts, as it does without a disk."""
    harness = make_disk_harness(rows_max=1, context_tokens=1_000_000)
    harness.disk.plan_bytes = 1 << 60
    batch, person = harness.front_end(), harness.front_end()
    batch.accepted("running", max_tokens=900_000, priority=10)
    harness.pass_()
    batch.accepted("waits", [5, *LONG], priority=10)
    harness.run_until(lambda: len(harness.disk.awaited) == 1)
    person.accepted("now", [7, *LONG], priority=-10)
    urgent = harness.actor.lifecycle.live()[-1]
    # Its threads take time and no passes.
    harness.run_until(lambda: urgent.phase != "preparing")
    assert harness.run_until(ends(person, "now")) < 100
    assert harness.disk.reads == [5, 7]
    batch.abort("running")
    harness.run_until(ends(batch, "waits"))
    assert batch.ends["waits"][0].finish == "length"
    assert harness.disk.reads == [5, 7]
    assert not harness.disk.awaited


def test_a_prompt_that_waits_for_room_stands_in_line(make_disk_harness: Callable[..., DiskHarness]) -> None:
    """Its class and flow count as they do for anybody; it is read as soon as the room is free."""
    harness = make_disk_harness(rows_max=1, context_tokens=1_000_000)
    harness.disk.plan_bytes = 1 << 60
    first, second = harness.front_end(), harness.front_end()
    first.accepted("running", max_tokens=900_000)
    harness.pass_()
    first.accepted("held", [5, *LONG])
    harness.run_until(lambda: len(harness.disk.awaited) == 1)
    second.accepted("waits", [7, *LONG])
    harness.run_until(lambda: harness.actor.lifecycle.live()[-1].phase == "queued")
    assert harness.disk.reads == [5]
    first.abort("running")
    harness.run_until(lambda: ends(first, "held")() and ends(second, "waits")())
    assert sorted(harness.disk.reads) in ([5], [5, 7])
    assert not harness.disk.awaited


def test_prompts_that_come_together_are_read_one_after_the_other(harness: DiskHarness) -> None:
    """There is room for one and a row for each: to wait for a working disk is faster than prefill."""
    harness.disk.plan_bytes = 1 << 60
    front_end = harness.front_end()
    names = [f"r{number}" for number in range(4)]
    for message in [front_end.insert_message(name, LONG) for name in names]:
        front_end.send(message)
    harness.read_commands(4)
    harness.run_until(ends(front_end, *names))
    assert harness.disk.reading == 4
    assert not harness.disk.awaited


def test_reads_are_fair_between_flows(harness: DiskHarness) -> None:
    """Twenty prompts of one front-end do not hold up the one of another."""
    greedy, modest = harness.front_end(), harness.front_end()
    harness.disk.gate.clear()
    for number in range(20):
        greedy.accepted(f"g{number}", [5, *LONG])
    harness.run_until(lambda: harness.disk.reading == 2)
    modest.accepted("m", [7, *LONG])
    harness.run_until(lambda: harness.disk.looked_up == 21)
    harness.passes(3)
    harness.disk.gate.set()
    harness.run_until(ends(modest, "m"))
    assert harness.disk.reads.index(7) <= 4


def test_saving_takes_a_share_of_the_steps_and_all_of_idle_time(harness: DiskHarness) -> None:
    """While rows are stepped it is paid with a part of their time; with none, a large piece goes in every pass."""
    front_end = harness.front_end()
    front_end.accepted("short", max_tokens=3)
    harness.disk.unsaved = 1_000_000
    harness.run_until(lambda: front_end.read() or front_end.ends)
    busy = [bytes_ for bytes_ in harness.disk.saved if bytes_ == 1]
    assert busy
    harness.disk.saved.clear()
    harness.passes(3)
    assert len(harness.disk.saved) == 3
    assert min(harness.disk.saved) > 1 << 20
    assert harness.actor.lifecycle.prompt_disk.numbers() == {"prompt_disk_blocks": 7}


def test_saving_does_not_make_up_for_steps_in_which_there_was_nothing_to_save(
    harness: DiskHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After hours of steps, what is new is not copied all at once between two of them."""
    saving = harness.actor.lifecycle.prompt_disk
    now_s = itertools.count()
    monkeypatch.setattr(prompt_disk, "time", SimpleNamespace(perf_counter=lambda: next(now_s) / 100))
    harness.disk.unsaved = 1000
    saving.save(3600.0)
    # Each takes ten milliseconds.
    assert len(harness.disk.saved) <= 6
    saving.save(0.001)
    assert len(harness.disk.saved) <= 7


def test_a_drain_saves_in_the_time_that_is_left(harness: DiskHarness) -> None:
    """After the last answer was given, and not when the worker is told to stop at once."""
    harness.shared_status.ask_to_drain()
    harness.actor.run()
    assert harness.disk.closed_with == harness.config.drain_timeout_s
