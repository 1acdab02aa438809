"""One model of the launcher: its facts, its state, and the requests that use it or wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

State = Literal["unloaded", "loading", "ready", "draining", "failed"]

SPELL_LEAST_S = 10.0
"""Shortest spell in seconds. A person who changes the model has mostly used the earlier one for longer."""
SPELL_LOADS = 4
"""Length of a spell as a multiple of the load before it: two models in turn spend a fifth of their time loading."""
SPELL_MOST_S = 120.0
"""Longest spell in seconds: a request for another model waits for it."""
LULL_LEAST_S = 2.0
"""Shortest idle time in seconds that ends a spell early."""
TTL_S = 3600.0
"""Default idle time after which a model is unloaded, in seconds; LM Studio's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """Facts of a model for the launcher's decisions.

    `signature`: of the worker's options; a worker with another one is replaced. `never`: reason for which the model
    cannot be loaded here, else empty. The last four are those of `WorkerConfig`.
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
    """Last log line of a failed worker."""
    measured_bytes: int = 0
    """Maximum size of an idle worker of this model, in bytes."""
    held_bytes: int = 0
    """Present bytes of its worker, KV caches of its requests included."""
    started_bytes: int = 0
    """The need when its worker was started; the list may have another one by now."""
    requests: int = 0
    """Running requests of its worker, by its last status."""
    told_s: float = -inf
    """Time at which that status was requested."""
    asked_s: float = -inf
    """Time at which a status was last requested because the model is to be unloaded."""
    holds: set[int] = field(default_factory=set)
    waiting: dict[int, float] = field(default_factory=dict)
    """Tickets of waiting requests, with their arrival; the oldest first."""
    keeps: dict[int, float] = field(default_factory=dict)
    """Idle time to be set, by tickets of waiting requests that have one."""
    wanted_keep_s: float | None = None
    """Idle time to be set by the command that loads it."""
    wanted_s: float | None = None
    """Time since which it is to be loaded without a request: preloaded, or by command."""
    used_s: float = -inf
    keep_s: float = TTL_S
    start_at_s: float = -inf
    """Time before which no worker is started, after a failure."""
    started: bool = False
    """Whether the worker of a model in state `loading` runs already."""
    started_s: float = 0.0
    ready_s: float = inf
    load_s: float = 0.0
    loads: int = 0
    failures: int = 0
    closing_s: float | None = None
    """Time since which no further request is granted, because the model is unloaded once it is idle."""
    unload_wanted: bool = False
    served_first: set[int] = field(default_factory=set)
    """Tickets that waited when the command to unload it came, and are granted before it counts."""
    rest_until_s: float = -inf
    """Time before which no worker is started, after a command to unload it."""
    running: str = ""
    """Signature of the options of its worker."""
    removed: bool = False
    """Whether it is off the list, and only its worker has to end."""
    drain_s: float = inf

    @property
    def is_loaded(self) -> bool:
        """Whether a worker takes its memory, or is about to."""
        return self.state in ("loading", "ready", "draining")

    @property
    def is_unloaded_by_command(self) -> bool:
        """Whether a command to unload it counts: no request waits from before it."""
        return self.unload_wanted and self.served_first.isdisjoint(self.waiting)

    @property
    def may_start_s(self) -> float:
        """Time before which no worker is started."""
        return max(self.start_at_s, self.rest_until_s)

    @property
    def is_stale(self) -> bool:
        """Whether its worker's options differ from those on the list."""
        return self.is_loaded and (self.removed or self.running != self.facts.signature)

    @property
    def spell_s(self) -> float:
        """Seconds that it stays loaded at least once it is ready, while other models wait for its memory."""
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
        """Whether no request uses it, as far as is known."""
        return not self.holds and not self.requests

    @property
    def wanted_since_s(self) -> float | None:
        """Arrival of its oldest request or command to load it; None without one."""
        first = next(iter(self.waiting.values()), None)
        wishes = [at_s for at_s in (first, self.wanted_s) if at_s is not None]
        return min(wishes, default=None)

    @property
    def expires_s(self) -> float:
        """Time at which it is unloaded if it stays idle; infinite for never."""
        if self.state != "ready" or self.facts.pin or not self.is_idle or self.waiting:
            return inf
        return self.used_s + self.keep_s

    def retry_wait_s(self) -> float:
        """The wait before the next start, after this many failures."""
        doubled: float = self.facts.restart_wait_s * 2 ** min(max(0, self.failures - 1), 30)
        return min(doubled, self.facts.restart_wait_max_s)
