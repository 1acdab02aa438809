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
        self.gate = threading.Event()
        self.gate.set()
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
        return RestorePlan([b"key"] * self.count, 3 * BLOCK_BYTES, 64) if self.count else None

    def read(self, plan: RestorePlan, tokens: np.ndarray) -> deque[Block]:
        self.reads.append(int(tokens[0]))
        assert self.gate.wait(60)
        if self.failing:
            raise RuntimeError("a bug")
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
    harness: DiskHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only until it is queued again: what others read meanwhile would have it go."""
    front_end = harness.front_end()
    front_end.accepted("long", LONG)
    (request,) = harness.actor.lifecycle.live()
    released: list[str] = []
    release = harness.disk.release

    def note(awaited_by: Hashable) -> None:
        released.append(request.phase)
        release(awaited_by)

    monkeypatch.setattr(harness.disk, "release", note)
    harness.run_until(lambda: harness.disk.awaited)
    assert request.phase == "preparing"
    harness.run_until(ends(front_end, "long"))
    assert released == ["running"]
    assert not harness.disk.awaited


def test_short_prompts_and_what_is_not_there_start_at_once(harness: DiskHarness) -> None:
    """A prompt of less than a block is not looked for; of one that is not on disk nothing is read."""
    front_end = harness.front_end()
    front_end.accepted("short")
    harness.disk.count = 0
    front_end.accepted("unknown", LONG)
    harness.run_until(lambda: front_end.read() or len(front_end.ends) == 2)
    assert harness.disk.reading == 0


def test_a_prompt_that_is_read_in_part_is_not_looked_for(
    make_disk_harness: Callable[..., DiskHarness],
) -> None:
    """Its row would take nothing of it from memory."""
    harness = make_disk_harness(keeps=True)
    front_end = harness.front_end()
    front_end.accepted("part", LONG, prefill_keep=0.5)
    harness.run_until(lambda: front_end.read() or len(front_end.ends) == 1)
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
    """Aborted while it waits for another's read, is read, or is moved to memory: one answer, and the next is served."""
    front_end = harness.front_end()
    if stage != "making":
        harness.disk.gate.clear()
    if stage == "waiting":
        front_end.accepted("before", LONG)
        harness.run_until(lambda: harness.disk.reading)
    front_end.accepted("long", LONG)
    if stage == "reading":
        harness.run_until(lambda: harness.disk.reading)
    elif stage == "making":
        harness.run_until(lambda: harness.disk.restored)
    else:
        harness.passes(5)
        assert harness.disk.reading == 1, "two are read at once"
    front_end.abort("long")
    harness.run_until(lambda: front_end.read() or front_end.ends.get("long"))
    assert [end.finish for end in front_end.ends["long"]] == ["abort"]
    harness.disk.gate.set()
    front_end.accepted("next", LONG)
    harness.run_until(lambda: front_end.read() or front_end.ends.get("next"))
    assert [end.finish for end in front_end.ends["next"]] == ["length"]
    assert not harness.disk.awaited


def ends(front_end: FrontEnd, *names: str) -> Callable[[], bool]:
    def have_ended() -> bool:
        front_end.read()
        return all(name in front_end.ends for name in names)

    return have_ended


def test_a_read_that_hangs_delays_others_once_and_for_a_bounded_time(harness: DiskHarness) -> None:
    """Prompts that are not on disk start at once. Those that wait for the read are prefilled after the time-out, and
    all others until it returns."""
    front_end = harness.front_end()
    harness.disk.gate.clear()
    front_end.accepted("hangs", LONG)
    front_end.accepted("behind", LONG)
    harness.run_until(lambda: harness.disk.reading)
    harness.disk.count = 0
    front_end.accepted("absent", LONG)
    harness.run_until(ends(front_end, "absent"))
    assert set(front_end.ends) == {"absent"}
    harness.disk.count = 3
    harness.clock.advance(prompt_disk.READ_S)
    harness.run_until(ends(front_end, "hangs", "behind"))
    front_end.accepted("later", LONG)
    harness.run_until(ends(front_end, "later"))
    assert harness.disk.reading == 1
    assert {end.finish for found in front_end.ends.values() for end in found} == {"length"}
    harness.disk.gate.set()
    hung = harness.actor.lifecycle.prompt_disk._abandoned
    assert hung is not None
    harness.run_until(lambda: not hung.is_running)
    front_end.accepted("again", LONG)
    harness.run_until(ends(front_end, "again"))
    assert harness.disk.reading == 2
    assert not harness.disk.awaited


def test_an_urgent_request_takes_the_room_of_a_restored_one(
    make_disk_harness: Callable[..., DiskHarness],
) -> None:
    """A restored batch job that gets no row gives up what is held for it, and is not read a second time."""
    harness = make_disk_harness(rows_max=1, context_tokens=1_000_000)
    batch, person = harness.front_end(), harness.front_end()
    harness.disk.gate.clear()
    batch.accepted("waits", [5, *LONG], priority=10)
    harness.run_until(lambda: harness.disk.reading)
    batch.accepted("running", max_tokens=900_000, priority=10)
    harness.pass_()
    harness.disk.gate.set()
    harness.run_until(lambda: harness.actor.lifecycle.live()[0].phase == "queued")
    assert len(harness.disk.awaited) == 1
    person.accepted("now", [7, *LONG], priority=-10)
    harness.run_until(ends(person, "now"))
    assert harness.disk.reads == [5, 7]
    assert not harness.disk.awaited
    batch.abort("running")
    harness.run_until(ends(batch, "waits"))
    assert batch.ends["waits"][0].finish == "length"
    assert harness.disk.reads == [5, 7]


def test_prompts_that_come_together_are_read_one_after_the_other(harness: DiskHarness) -> None:
    """There is a row for each: to wait for a working disk is faster than prefill."""
    front_end = harness.front_end()
    names = [f"r{number}" for number in range(4)]
    for message in [front_end.insert_message(name, LONG) for name in names]:
        front_end.send(message)
    harness.read_commands(4)
    harness.run_until(ends(front_end, *names))
    assert harness.disk.reading == 4
    assert not harness.disk.awaited


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
