"""Workers, requests and a clock that exist in numbers alone, for tests of the launcher's decisions."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zmqengine.errors import ZmqEngineError
from zmqengine.serve.fleet import (
    DrainWorker,
    Fleet,
    GrantRequest,
    KillWorker,
    LookAtWorker,
    RefuseRequest,
    StartWorker,
)
from zmqengine.serve.model import FleetFacts

GIB = 1 << 30


def facts(name: str, gib: float, **more: object) -> FleetFacts:
    """A model that needs this much."""
    return FleetFacts(name=name, need_bytes=int(gib * GIB), **more)  # type: ignore[arg-type]


@dataclass
class Life:
    """One worker, from its start to its end."""

    name: str
    started_s: float
    ready_s: float | None = None
    drained_s: float | None = None
    ended_s: float | None = None


@dataclass
class World:
    """Carries out the decisions of a fleet, and checks each of them.

    `load_s` is what a load takes, `fails` whether it fails. A request runs for as long as it was made to.
    """

    budget_gib: float
    models: Sequence[FleetFacts]
    load_s: Callable[[str], float] = lambda name: 2.0
    fails: Callable[[str], bool] = lambda name: False
    now_s: float = 0.0
    lives: list[Life] = field(default_factory=list)
    granted: dict[int, float] = field(default_factory=dict)
    refused: dict[int, ZmqEngineError] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    drains_s: float = 0.2
    kills: int = 0

    def __post_init__(self) -> None:
        self.fleet = Fleet(int(self.budget_gib * GIB))
        self._tickets = itertools.count()
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._alive: dict[str, Life] = {}
        self._lasts: dict[int, float] = {}
        self._running: dict[str, set[int]] = {}
        self.raw: dict[str, int] = {}
        self.fleet.configure(self.models, 0.0)
        self.settle()

    # --- what a test does ----------------------------------------------------------------------------------

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), act))

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + wait_s, act)

    def request(self, name: str, lasts_s: float = 1.0, keep_s: float | None = None) -> int:
        ticket = next(self._tickets)
        self.asked[ticket], self._lasts[ticket] = self.now_s, lasts_s
        self.fleet.acquire(ticket, name, self.now_s, keep_s=keep_s)
        self.settle()
        return ticket

    def request_at(self, at_s: float, name: str, lasts_s: float) -> None:
        self.at(at_s, lambda: void(self.request(name, lasts_s)))

    def give_up(self, ticket: int) -> None:
        self.released.add(ticket)
        for running in self._running.values():
            running.discard(ticket)
        self.fleet.release(ticket, self.now_s)
        self.settle()

    def crash(self, name: str, code: int = -9) -> None:
        """The worker dies; its requests go on in the next one."""
        if name in self._alive:
            self._end(self._alive[name], code)

    def run(self, until_s: float) -> None:
        while True:
            next_s = self.fleet.next_s(self.now_s)
            due_s = self._due[0][0] if self._due else float("inf")
            at_s = min(next_s, due_s)
            if at_s > until_s:
                self.now_s = until_s
                return
            assert at_s > self.now_s or due_s <= self.now_s, "the fleet wants to run again at once"
            self.now_s = max(self.now_s, at_s)
            if due_s <= self.now_s:
                heapq.heappop(self._due)[2]()
            self.settle()

    def state(self, name: str) -> str:
        return self.fleet.models[name].state

    def swaps(self) -> list[tuple[float, float, str]]:
        """When each worker was ready, when it was told to leave, and of which model it was."""
        return [
            (life.ready_s, life.drained_s, life.name)
            for life in self.lives
            if life.ready_s is not None and life.drained_s is not None
        ]

    # --- what the fleet decides ----------------------------------------------------------------------------

    def settle(self) -> None:
        for _ in range(100):
            before = self.fleet.reserved_bytes
            decisions = self.fleet.advance(self.now_s)
            if not decisions:
                return
            room = self.fleet.budget_bytes - self.fleet.foreign_bytes
            assert self.fleet.reserved_bytes <= max(room, before), "over budget"
            for decision in decisions:
                self._carry_out(decision)
        raise AssertionError("the fleet never settles")

    def _carry_out(self, decision: object) -> None:
        match decision:
            case StartWorker(name):
                assert name not in self._alive, "the same model twice"
                life = self._alive[name] = Life(name, self.now_s)
                self.lives.append(life)
                self.after(self.load_s(name), lambda: self._loaded(life))
            case LookAtWorker(name):
                asked_s, life = self.now_s, self._alive[name]
                self.after(0.01, lambda: self._tell(life, asked_s))
            case DrainWorker(name):
                assert not self._running.get(name), "a running request would be ended"
                assert not (self._alive[name].ready_s is not None and self.raw.get(name))
                life = self._alive[name]
                life.drained_s = self.now_s
                self.after(self.drains_s, lambda: self._end(life, 0))
            case KillWorker(name):
                self.kills += 1
                self._end(self._alive[name], -9)
            case GrantRequest(ticket, name):
                self._outcome(ticket)
                assert self._alive[name].ready_s is not None, "granted before it was ready"
                assert self._alive[name].drained_s is None, "granted to a worker that leaves"
                self.granted[ticket] = self.now_s
                self._running.setdefault(name, set()).add(ticket)
                self.after(self._lasts[ticket], lambda: self._done(ticket, name))
            case RefuseRequest(ticket, error):
                self._outcome(ticket)
                self.refused[ticket] = error
            case _:
                raise AssertionError(decision)

    def _outcome(self, ticket: int) -> None:
        assert ticket not in self.granted.keys() | self.refused.keys(), "two outcomes"
        assert ticket not in self.released, "an outcome after the end"

    def _loaded(self, life: Life) -> None:
        if life.ended_s is not None or life.drained_s is not None:
            return
        if self.fails(life.name):
            self._end(life, 1)
        else:
            life.ready_s = self.now_s
            self.fleet.became_ready(life.name, self.now_s)

    def _tell(self, life: Life, asked_s: float) -> None:
        if life.ended_s is None and life.drained_s is None:
            running = len(self._running.get(life.name, ())) + self.raw.get(life.name, 0)
            self.fleet.told(life.name, running, asked_s)

    def _done(self, ticket: int, name: str) -> None:
        if ticket not in self.released:
            self._running[name].discard(ticket)
            self.released.add(ticket)
            self.fleet.release(ticket, self.now_s)

    def _end(self, life: Life, code: int) -> None:
        if life.ended_s is None:
            life.ended_s = self.now_s
            del self._alive[life.name]
            self.fleet.exited(life.name, code, "last words", self.now_s)
            self.settle()


def void(_: object) -> None:
    """Takes a result that nobody needs."""


def seeded(seed: int) -> random.Random:
    return random.Random(seed)
