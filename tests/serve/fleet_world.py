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


TOLD_EVERY_S = 5.0


@dataclass
class Life:
    """One worker, from its start to its end, with the bytes that it was started for and those that it says it holds."""

    name: str
    started_s: float
    needs: int
    held: int = 0
    ready_s: float | None = None
    drained_s: float | None = None
    ended_s: float | None = None


@dataclass
class World:
    """Carries out the decisions of a fleet, and checks each of them by a count of its own.

    `load_s` is the time of a load, `fails` whether it fails, `holds` the bytes that a worker says it holds, by the
    number of its requests; None for workers that are silent until they are asked. A request runs for as long as it was
    made to.
    """

    budget_gib: float
    models: Sequence[FleetFacts]
    load_s: Callable[[str], float] = lambda name: 2.0
    fails: Callable[[str], bool] = lambda name: False
    holds: Callable[[str, int], int] | None = None
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
        self._foreign = 0
        self._listed: dict[str, FleetFacts] = {}
        self._measured: dict[str, int] = {}
        self._kept: dict[str, Life] = {}
        """Workers that died and are to be started again in their place."""
        self.configure(self.models)

    # --- what a test does ----------------------------------------------------------------------------------

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), act))

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + wait_s, act)

    def configure(self, models: Sequence[FleetFacts]) -> None:
        """Another list of models."""
        self._listed |= {each.name: each for each in models}
        self.fleet.configure(models, self.now_s)
        self._forget()
        self.settle()

    def set_foreign(self, size: int) -> None:
        """The claims of workers of others."""
        self._foreign = size
        self.fleet.set_foreign(size)
        self.settle()

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
        """The state of a model; one that is off the list is unloaded."""
        model = self.fleet.models.get(name)
        return "unloaded" if model is None else model.state

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
            decisions = self.fleet.advance(self.now_s)
            if not decisions:
                return
            for decision in decisions:
                self._carry_out(decision)
        raise AssertionError("the fleet never settles")

    def _carry_out(self, decision: object) -> None:
        match decision:
            case StartWorker(name):
                assert name not in self._alive, "the same model twice"
                life = Life(name, self.now_s, self._needs(name))
                self._check_memory(life)
                self._alive[name] = life
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
                if ticket in self.granted:
                    self._lost(ticket)
                else:
                    self._outcome(ticket)
                self.refused[ticket] = error
            case _:
                raise AssertionError(decision)

    def _check_memory(self, new: Life) -> None:
        """A worker in the place of one that died may start; any other has to fit beside all that there are."""
        if self._kept.pop(new.name, None) is not None:
            return
        self._kept = {name: life for name, life in self._kept.items() if self.state(name) == "loading"}
        taken = sum(self._takes(life) for life in [*self._alive.values(), *self._kept.values()])
        room = int(self.budget_gib * GIB) - self._foreign
        assert taken + new.needs <= room, "over budget"

    def _forget(self) -> None:
        """A model that is off the list takes its measurements with it."""
        self._measured = {name: size for name, size in self._measured.items() if name in self.fleet.models}

    def _needs(self, name: str) -> int:
        return max(self._listed[name].need_bytes, self._measured.get(name, 0))

    def _takes(self, life: Life) -> int:
        needs = max(life.needs, self._needs(life.name))
        return needs if self._listed[life.name].pin else max(needs, life.held)

    def _outcome(self, ticket: int) -> None:
        assert ticket not in self.granted.keys() | self.refused.keys(), "two outcomes"
        assert ticket not in self.released, "an outcome after the end"

    def _lost(self, ticket: int) -> None:
        """A request that runs ends only where no worker of its model comes back."""
        assert ticket not in self.released, "an outcome after the end"
        (name,) = (name for name, running in self._running.items() if ticket in running)
        assert name not in self._alive
        assert self.state(name) == "failed", "a running request would be ended"
        self._running[name].remove(ticket)
        self.released.add(ticket)

    def _loaded(self, life: Life) -> None:
        if life.ended_s is not None or life.drained_s is not None:
            return
        if self.fails(life.name):
            self._end(life, 1)
        else:
            life.ready_s = self.now_s
            self.fleet.became_ready(life.name, self.now_s)
            if self.holds is not None:
                self._tell_ever(life)

    def _tell_ever(self, life: Life) -> None:
        if life.ended_s is None:
            self._tell(life, self.now_s)
            self.after(TOLD_EVERY_S, lambda: self._tell_ever(life))

    def _tell(self, life: Life, asked_s: float) -> None:
        if life.ended_s is None and life.drained_s is None:
            running = len(self._running.get(life.name, ())) + self.raw.get(life.name, 0)
            life.held = 0 if self.holds is None else self.holds(life.name, running)
            if not running:
                self._measured[life.name] = max(self._measured.get(life.name, 0), life.held)
            self.fleet.told(life.name, running, asked_s, held_bytes=life.held)

    def _done(self, ticket: int, name: str) -> None:
        if ticket not in self.released:
            self._running[name].discard(ticket)
            self.released.add(ticket)
            self.fleet.release(ticket, self.now_s)

    def _end(self, life: Life, code: int) -> None:
        if life.ended_s is None:
            life.ended_s, life.held = self.now_s, 0
            del self._alive[life.name]
            self.fleet.exited(life.name, code, "last words", self.now_s)
            self._forget()
            if self.state(life.name) == "loading":
                self._kept[life.name] = life
            self.settle()


def void(_: object) -> None:
    """Takes a result that nobody needs."""


def seeded(seed: int) -> random.Random:
    return random.Random(seed)
