"""Bounds in every phase, over random lives of requests whose grammars are slow and whose disk hangs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.harness import FrontEnd, Harness
from tests.worker.preparing.test_preparing import Compiler
from tests.worker.preparing.test_prompt_disk import LONG, DiskEngine
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Abort, Accepted, Bye, Constraint, Rejected
from zmqengine.worker.preparing import prompt_disk

QUEUE_MAX = 12
LOG_BYTES_MAX = 65_536


class RandomLife:
    """Front-ends that insert, abort and leave, beside a disk and a compiler that stop and go on."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = DiskEngine(rows_max=3)
        self.disk = self.engine.fake_disk
        self.harness = Harness(
            directory,
            self.engine,
            compiler=Compiler(self.refuse),
            queue_max=QUEUE_MAX,
            token_log_bytes_max=LOG_BYTES_MAX,
            lease_ms=1_000_000,
        )
        self.front_ends = [self.harness.front_end() for _ in range(3)]
        self.accepted: dict[FrontEnd, list[str]] = {one: [] for one in self.front_ends}
        self.inserts = self.refusals = 0

    def refuse(self, constraint: Constraint) -> Any:
        assert self.disk.gate.wait(60)
        raise BadRequest("made by a test")

    def act(self) -> None:
        kind = self.random.random()
        front_end = self.random.choice(self.front_ends)
        if kind < 0.5:
            self.insert(front_end)
        elif kind < 0.65 and self.accepted[front_end]:
            front_end.call(Abort(front_end.next_call(), self.random.choice(self.accepted[front_end])))
        elif kind < 0.67:
            self.replace(front_end)
        elif kind < 0.72:
            gate = self.disk.gate
            gate.clear() if gate.is_set() else gate.set()
        elif kind < 0.76:
            self.harness.clock.advance(self.random.choice([0.1, 1.0, prompt_disk.READ_S]))
        else:
            self.disk.count = self.random.choice([0, 3])
        for _ in range(self.random.randrange(4)):
            # Output is kept within its bound every 50 ms.
            self.harness.clock.advance(0.05)
            self.harness.pass_()
            self.check()

    def insert(self, front_end: FrontEnd) -> None:
        self.inserts += 1
        name = f"r{self.inserts}"
        fields: dict[str, Any] = {
            "priority": self.random.choice([-5, 0, 0, 5]),
            "max_tokens": self.random.randrange(1, 40),
            "logprobs": self.random.choice([None, 20]),
        }
        if self.random.random() < 0.2:
            fields["constraint"] = Constraint("json")
        reply = front_end.insert(name, LONG if self.random.random() < 0.6 else [5, 6], **fields)
        if isinstance(reply, Accepted):
            self.accepted[front_end].append(name)
            return
        assert isinstance(reply, Rejected)
        # By the queue alone: the output that others hold locks nobody out.
        assert "requests are waiting already" in reply.message
        self.refusals += 1

    def replace(self, front_end: FrontEnd) -> None:
        """A front-end says bye and another comes."""
        front_end.call(Bye(front_end.next_call()))
        self.front_ends.remove(front_end)
        del self.accepted[front_end]
        self.front_ends.append(self.harness.front_end())
        self.accepted[self.front_ends[-1]] = []

    def check(self) -> None:
        """Places are those of the requests without a row, and within the bound; so is the output that is held."""
        actor = self.harness.actor
        live = actor.lifecycle.live()
        order = actor.scheduler.order
        assert order.places == sum(request.phase != "running" for request in live)
        # Rows that were preempted come back beside those that were accepted since.
        assert order.places <= QUEUE_MAX + self.engine.rows_max
        for session in actor.sessions:
            # Three rows made a token of 2.7 KB since.
            assert actor.outgoing.held_bytes(session) <= LOG_BYTES_MAX + 10_000
        disk = actor.lifecycle.prompt_disk
        assert {*disk._tried, *disk._aside} <= set(live)

    def finish(self) -> None:
        """With the disk back every request ends, once, and nothing is left of it."""
        self.disk.gate.set()
        for front_end, names in self.accepted.items():
            front_end.wait_for_end(*names)
        actor = self.harness.actor
        preparer = actor.lifecycle.prompt_disk._preparer
        self.harness.run_until(lambda: not preparer._tasks)
        assert actor.scheduler.order.places == len(actor.scheduler.order) == 0
        disk = actor.lifecycle.prompt_disk
        assert not [*disk._tried, *disk._aside]
        assert disk._restore is None
        assert not self.disk.awaited


@pytest.fixture
def life(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RandomLife]:
    made = RandomLife(tmp_path, request.param)
    yield made
    made.disk.gate.set()
    made.harness.close()


@pytest.mark.parametrize(
    "life", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))], indirect=True
)
def test_bounds_hold_in_every_phase_and_nothing_stays(life: RandomLife) -> None:
    """Each request that was accepted has one terminal answer, whatever hangs meanwhile."""
    for _ in range(1000):
        life.act()
    life.finish()
    # Their number depends on threads: of 600 acts, 17 to 40 on an idle machine and 10 on a busy one.
    assert life.refusals > 10
