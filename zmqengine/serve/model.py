"""One model of the launcher: its facts, its state, and the requests that hold it or wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

State = Literal["unloaded", "loading", "ready", "draining", "failed"]

SPELL_LEAST_S = 10.0
"""The shortest spell. A person who changes the model has mostly used the earlier one for longer."""
SPELL_LOADS = 4
"""A spell lasts this many times the load before it, so that two models in turn spend a fifth of their time loading."""
SPELL_MOST_S = 120.0
"""The longest spell: a request for another model waits for it."""
LULL_LEAST_S = 2.0
"""The shortest time without a request that ends a spell early."""
TTL_S = 3600.0
"""Idle time after which a model is unloaded unless its entry says otherwise; LM Studio's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The facts of a model that the launcher decides by.

    `signature` stands for the options of its worker: with another one the worker is replaced. `never` says why the
    model cannot be loaded here; empty for one that can. The last four are those of `WorkerConfig`.
    """

    name: str
    need_bytes: int
    signature: str = ""
    pin: bool = False
    ttl_s: float = TTL_S
    preload: bool = False
    never: str = ""
    restarts_max: int = 5
    restart_window_s: float = 60.0
    restart_wait_s: float = 0.1
    restart_wait_max_s: float = 10.0


@dataclass(slots=True)
class FleetModel:
    """The runtime state of one model. `Fleet` alone changes it."""

    facts: FleetFacts
    state: State = "unloaded"
    stage: str = ""
    fraction: float | None = None
    exit_code: int | None = None
    message: str = ""
    """The last words of a worker that failed."""
    measured_bytes: int = 0
    """The most that an idle worker of it held."""
    held_bytes: int = 0
    """The bytes that its worker holds now, KV caches of its requests included."""
    started_bytes: int = 0
    """The need that its worker was started with; the list may say another one since."""
    requests: int = 0
    """Requests at the worker that have not ended, as its status told last."""
    told_s: float = -inf
    """When that status was asked for."""
    asked_s: float = -inf
    """When a status was last asked for because the model is to leave."""
    holds: set[int] = field(default_factory=set)
    waiting: dict[int, float] = field(default_factory=dict)
    """Tickets of waiting requests, with their arrival; the oldest first."""
    keeps: dict[int, float] = field(default_factory=dict)
    """How long it is to be kept idle, by tickets of waiting requests that say so."""
    wanted_keep_s: float | None = None
    """The same of the command that wants it loaded."""
    wanted_s: float | None = None
    """Since when it is to be loaded without a request: preloaded, or by command."""
    used_s: float = -inf
    keep_s: float = TTL_S
    start_at_s: float = -inf
    """Before this time no worker is started: the wait after a failure."""
    started: bool = False
    """Whether the worker of the state `loading` runs already."""
    started_s: float = 0.0
    ready_s: float = inf
    load_s: float = 0.0
    loads: int = 0
    failures: int = 0
    closing_s: float | None = None
    """Since when no further request is granted, because the model is to leave once it is idle."""
    unload_wanted: bool = False
    running: str = ""
    """The signature that its worker was started with."""
    removed: bool = False
    """Whether it is off the list, and only its worker is still to leave."""
    drain_s: float = inf

    @property
    def is_loaded(self) -> bool:
        """Whether a worker has or is about to have its memory."""
        return self.state in ("loading", "ready", "draining")

    @property
    def is_stale(self) -> bool:
        """Whether its worker has other options than the list says now."""
        return self.is_loaded and (self.removed or self.running != self.facts.signature)

    @property
    def spell_s(self) -> float:
        """The time that it stays at least once it is ready, while other models wait for its memory."""
        return min(SPELL_MOST_S, max(SPELL_LEAST_S, SPELL_LOADS * self.load_s))

    @property
    def spell_ends_s(self) -> float:
        """The end of its spell; infinite before it is ready. An idle model has a shorter one."""
        ends_s = self.ready_s + self.spell_s
        if not self.is_idle:
            return ends_s
        return min(ends_s, max(self.ready_s, self.used_s) + max(LULL_LEAST_S, self.load_s))

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it, as far as is known."""
        return not self.holds and not self.requests

    @property
    def wanted_since_s(self) -> float | None:
        """The arrival of its oldest wish to be loaded; None if there is none."""
        first = next(iter(self.waiting.values()), None)
        wishes = [at_s for at_s in (first, self.wanted_s) if at_s is not None]
        return min(wishes, default=None)

    @property
    def expires_s(self) -> float:
        """When it is unloaded if nobody uses it; infinite for never."""
        if self.state != "ready" or self.facts.pin or not self.is_idle or self.waiting:
            return inf
        return self.used_s + self.keep_s

    def retry_wait_s(self) -> float:
        """The wait before the next start, after this many failures."""
        doubled: float = self.facts.restart_wait_s * 2 ** min(max(0, self.failures - 1), 30)
        return min(doubled, self.facts.restart_wait_max_s)
