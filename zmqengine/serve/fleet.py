"""The decisions of the launcher: which model is loaded or unloaded, and which request waits. No I/O, no clock.

The rule of memory. A model *needs* its weights and the KV cache of one chat, or its measured size when idle if that is
more. While it is loaded, loading or unloading it takes its need, or its present size with its requests if that is more;
of a pinned one only the need counts, since its requests would keep others out for ever. A model is started only if all
of these fit in the budget less the claims of other launchers' workers. One that cannot fit beside the pinned ones is
refused at once, with the numbers.

The rule of turns. Requests wait by model, and models are loaded in the order of their oldest waiting request. A ready
model takes every request at once. If a model that waits has no room, the least recently used models give way: one that
is idle and past its spell leaves at once; one that is busy and past its spell is granted no further request and leaves
when its last one has ended. A spell begins when a model is ready and lasts 10 s, or 4 times the load before it if that
is longer, and 120 s at most. It ends early when nobody has used the model for as long as its load took, and 2 s at
least. No request is ended for the sake of another model.

The rule of commands. A command to unload a model counts once every request that waited for it before has been granted.
A model that was unloaded by command is started again 10 s after its last start at the earliest, so that loading and
unloading in turn starts no more workers than that.

The bound on waiting. Of k models of which no two fit together, each waits for at most k - 1 turns of the others, and a
turn is a load, a spell, and the rest of the longest request that runs at its end. There is at most one swap a spell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from zmqengine.errors import ModelLoadError, NeverFits, Overloaded, UnknownModel, ZmqEngineError
from zmqengine.serve.model import SPELL_LEAST_S, FleetFacts, FleetModel
from zmqengine.worker.process.supervisor import how_it_ended

LOOK_EVERY_S = 1.0
"""Seconds between two status requests to a model that is to be unloaded."""
KILL_AFTER_S = 60.0
"""Seconds for a drained worker to end: an idle one takes less than a second, and more to write its prompts to disk."""
RETRY_AFTER_MS = 10_000
"""Retry-after for a request without room beside other workers of the machine, whose end is unknown."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Decision: start the worker of a model."""

    name: str


@dataclass(frozen=True, slots=True)
class LookAtWorker:
    """Decision: ask for a worker's status now; it is to be unloaded once it has no requests."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Decision: drain a worker without requests."""

    name: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Decision: kill a worker that did not end after its drain."""

    name: str


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """Decision: grant a request its model, which stays loaded until the ticket is released."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Decision: refuse a request, whose ticket is released."""

    ticket: int
    error: ZmqEngineError


Decision = StartWorker | LookAtWorker | DrainWorker | KillWorker | GrantRequest | RefuseRequest


class Fleet:
    """All models and their state. Each event has the time; `advance` returns the decisions that follow.

    A ticket is a number chosen by the caller, one for each request. It is granted or refused exactly once, unless it is
    released before. A granted one is refused if its model fails: no worker comes back for it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.foreign_bytes = 0
        self.models: dict[str, FleetModel] = {}
        self._tickets: dict[int, str] = {}
        self._refused: list[RefuseRequest] = []

    # --- events --------------------------------------------------------------------------------------------

    def configure(self, facts: Sequence[FleetFacts], now_s: float) -> None:
        """Replace the list of models. A worker whose options are unchanged continues."""
        facts_by_name = {each.name: each for each in facts}
        for name, model in list(self.models.items()):
            if name not in facts_by_name:
                self._remove(model)
        for name, each in facts_by_name.items():
            known = self.models.get(name)
            if known is None:
                known = self.models[name] = FleetModel(each, keep_s=each.ttl_s)
            elif known.facts.signature != each.signature:
                self._forget_failures(known)
            if known.facts.ttl_s != each.ttl_s:
                known.keep_s = each.ttl_s
            known.removed = False
            known.facts = each
            if each.preload and known.state == "unloaded" and not each.never:
                known.wanted_s = now_s

    def set_foreign(self, size: int) -> None:
        """Set the bytes claimed by workers of others."""
        self.foreign_bytes = size

    def adopt(self, name: str, signature: str, now_s: float) -> None:
        """Adopt a running worker of an earlier launcher; `became_ready` follows."""
        model = self.models[name]
        model.state, model.started, model.started_s = "loading", True, now_s
        model.running, model.used_s = signature, now_s

    def acquire(self, ticket: int, name: str, now_s: float, *, keep_s: float | None = None) -> None:
        """Add a request for a model. `keep_s`: seconds that the model stays loaded when idle, from then on; None for no
        change."""
        assert ticket not in self._tickets
        model = self.models.get(name)
        if model is None or model.removed:
            self._refused.append(RefuseRequest(ticket, UnknownModel(f"there is no model {name!r}")))
            return
        self._tickets[ticket] = name
        model.waiting[ticket] = now_s
        if keep_s is not None:
            # Applied at the grant: the present worker may have to be unloaded first.
            model.keeps[ticket] = keep_s

    def release(self, ticket: int, now_s: float) -> None:
        """Remove a request that ended or no longer waits. Idempotent."""
        name = self._tickets.pop(ticket, None)
        if name is None:
            return
        model = self.models[name]
        model.waiting.pop(ticket, None)
        model.keeps.pop(ticket, None)
        if ticket in model.holds:
            model.holds.remove(ticket)
            model.used_s = now_s

    def load(self, name: str, now_s: float, *, keep_s: float | None = None) -> None:
        """Load a model without a request, also one that failed before. Raises the error of a refusal."""
        model = self._known(name)
        self._forget_failures(model)
        refusal = self.refusal(model)
        if refusal is not None:
            raise refusal
        model.unload_wanted = False
        if model.state in ("unloaded", "draining"):
            model.wanted_s, model.wanted_keep_s = now_s, keep_s
        elif keep_s is not None:
            model.keep_s = keep_s

    def unload(self, name: str, now_s: float) -> None:
        """Unload a model, pinned or not, once the requests that wait or run now have ended; later ones load it
        again."""
        model = self._known(name)
        model.wanted_s = None
        if model.state in ("loading", "ready"):
            if not model.unload_wanted:
                model.unload_wanted, model.served_first = True, set(model.waiting)
        else:
            self._forget_failures(model)

    def progressed(self, name: str, stage: str, fraction: float | None) -> None:
        """Note the progress of a loading model."""
        model = self.models[name]
        if model.state == "loading":
            model.stage, model.fraction = stage, fraction

    def became_ready(self, name: str, now_s: float) -> None:
        """Note that a model's worker is ready."""
        model = self.models[name]
        if model.state != "loading":
            return
        model.state, model.stage, model.fraction = "ready", "", None
        model.exit_code, model.message = None, ""
        model.load_s, model.ready_s = now_s - model.started_s, now_s
        model.used_s = now_s
        model.loads += 1
        model.requests, model.told_s, model.asked_s = 0, -inf, -inf
        if model.wanted_keep_s is not None:
            model.keep_s = model.wanted_keep_s
        model.wanted_s = model.wanted_keep_s = None

    def told(self, name: str, requests: int, asked_s: float, *, held_bytes: int = 0) -> None:
        """Note a worker's status, requested at `asked_s`: running requests, and bytes in use.

        The size of an idle worker counts as the need of later workers of this model.
        """
        model = self.models[name]
        if model.state != "ready":
            return
        if requests or model.requests:
            model.used_s = max(model.used_s, asked_s)
        model.requests, model.told_s = requests, asked_s
        model.held_bytes = held_bytes
        if not requests:
            model.measured_bytes = max(model.measured_bytes, held_bytes)

    def exited(
        self, name: str, code: int | None, message: str, now_s: float, *, hopeless: bool = False
    ) -> None:
        """Note the end of a model's worker. `code` is None if unknown.

        `hopeless`: a restart would fail again, and is not tried.
        """
        model = self.models[name]
        was, model.closing_s, model.drain_s = model.state, None, inf
        was_ready_s = now_s - model.ready_s if was == "ready" else 0.0
        model.ready_s, model.requests, model.started = inf, 0, False
        model.stage, model.fraction, model.held_bytes = "", None, 0
        left = was == "draining" or model.removed or (was == "ready" and code == 0 and not model.holds)
        model.unload_wanted = False
        if left or (model.is_stale and not model.holds):
            model.state, model.keep_s = "unloaded", model.facts.ttl_s
            if model.removed:
                self._forget(model)
            return
        model.exit_code, model.message = code, message
        if was_ready_s >= model.facts.restart_window_s:
            model.failures = 0
        model.failures += 1
        if hopeless or model.failures >= model.facts.restarts_max:
            model.state, model.wanted_s = "failed", None
            return
        model.start_at_s = now_s + model.retry_wait_s()
        # Streams of a worker that was ready resume in the next one, so its memory stays reserved; that of a worker that
        # was never ready is free.
        model.state = "loading" if was == "ready" or model.holds else "unloaded"
        model.started_s = now_s

    # --- decisions -----------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> list[Decision]:
        """Decisions that are due now."""
        decisions: list[Decision] = [*self._refused]
        self._refused.clear()
        self._refuse_hopeless(decisions)
        leaving = self._leaving(now_s)
        leaving |= self._make_room(now_s, decisions, leaving)
        for model in list(self.models.values()):
            if model.state == "ready":
                self._grant_or_close(model, model.facts.name in leaving, now_s, decisions)
            elif model.state == "loading" and model.facts.name in leaving and not model.holds:
                self._give_up_loading(model, now_s, decisions)
            elif model.state == "loading" and not model.started and now_s >= model.start_at_s:
                self._start(model, now_s, decisions)
            elif model.state == "draining" and now_s >= model.drain_s + KILL_AFTER_S:
                model.drain_s = now_s
                decisions.append(KillWorker(model.facts.name))
        return decisions

    def next_s(self, now_s: float) -> float:
        """Time of the next `advance` without further events; infinite for never."""
        times = [inf]
        contended = any(self._wants_start(model) for model in self.models.values())
        for model in self.models.values():
            times.append(model.expires_s)
            if model.state == "draining":
                times.append(model.drain_s + KILL_AFTER_S)
            if model.closing_s is not None and not model.holds:
                times.append(model.asked_s + LOOK_EVERY_S)
            if self._wants_start(model):
                times.append(model.may_start_s)
            elif model.state == "loading" and not model.started:
                times.append(model.start_at_s)
            if contended and model.state == "ready":
                times.append(model.spell_ends_s)
        return min((at_s for at_s in times if at_s > now_s), default=inf)

    def need(self, model: FleetModel) -> int:
        """The need of a model in bytes: the estimate, or the measured size if that is more."""
        return max(model.facts.need_bytes, model.measured_bytes)

    def taken(self, model: FleetModel) -> int:
        """Bytes that a loaded, loading or unloading model takes."""
        taken = max(self.need(model), model.started_bytes)
        return taken if model.facts.pin else max(taken, model.held_bytes)

    def refusal(self, model: FleetModel) -> ZmqEngineError | None:
        """The error for a model that cannot be loaded however long a request waits; None if it can."""
        name, need = model.facts.name, self.need(model)
        if model.facts.never:
            return ModelLoadError(f"{name} cannot be loaded here: {model.facts.never}")
        if model.state == "failed":
            ended = "" if model.exit_code is None else f": its worker {how_it_ended(model.exit_code)}"
            return ModelLoadError(f"{name} failed to load{ended}: {model.message or 'its log says more'}")
        pinned_bytes = sum(
            self.need(each)
            for each in self.models.values()
            if each.facts.pin and each.is_loaded and each is not model
        )
        if need + pinned_bytes > self.budget_bytes:
            beside = f", of which pinned models take {_gib(pinned_bytes)}" if pinned_bytes else ""
            return NeverFits(f"{name} needs {_gib(need)} and there are {_gib(self.budget_bytes)}{beside}")
        if need + pinned_bytes + self.foreign_bytes > self.budget_bytes:
            return Overloaded(
                f"{name} needs {_gib(need)}, but other workers of this machine take {_gib(self.foreign_bytes)} of "
                f"{_gib(self.budget_bytes)}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return None

    def before(self, model: FleetModel) -> list[str]:
        """The models with a turn before that of a waiting model: those that take its memory, and those that have waited
        longer."""
        since_s = model.wanted_since_s
        return [
            name
            for name, each in self.models.items()
            if each is not model
            and (each.is_loaded or (self._wants_start(each) and (each.wanted_since_s or 0) < (since_s or 0)))
        ]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all loaded, loading and unloading models."""
        return sum(self.taken(model) for model in self.models.values() if model.is_loaded)

    # --- steps of a decision -------------------------------------------------------------------------------

    def _refuse_hopeless(self, decisions: list[Decision]) -> None:
        for model in self.models.values():
            # Requests that run wait for the next worker, and a model that has failed gets none.
            lost = model.holds if model.state == "failed" else set[int]()
            wishes = model.waiting or model.wanted_s is not None or lost
            if not wishes or model.is_loaded:
                continue
            refusal = self.refusal(model)
            if refusal is not None:
                model.wanted_s = None
                for ticket in (*model.waiting, *lost):
                    decisions.append(RefuseRequest(ticket, refusal))
                    del self._tickets[ticket]
                model.waiting.clear()
                model.keeps.clear()
                lost.clear()

    def _leaving(self, now_s: float) -> set[str]:
        """Models to be unloaded whether others wait or not: by command, after their idle time, or replaced."""
        return {
            name
            for name, model in self.models.items()
            if model.state in ("loading", "ready")
            and (model.is_unloaded_by_command or model.is_stale or now_s >= model.expires_s)
        }

    def _make_room(self, now_s: float, decisions: list[Decision], leaving: set[str]) -> set[str]:
        """Start the models that fit, in the order of their oldest request; returns those to be unloaded for others."""
        wanting = sorted(
            (
                model
                for model in self.models.values()
                if self._wants_start(model) and now_s >= model.may_start_s
            ),
            key=lambda model: model.wanted_since_s or 0.0,
        )
        free = self._room() - self.reserved_bytes
        # Memory left over by the models before this one, once all unloading models are gone.
        coming = sum(
            self.taken(model)
            for name, model in self.models.items()
            if model.state == "draining" or name in leaving
        )
        victims: set[str] = set()
        for model in wanting:
            need = self.need(model)
            if need <= free and need <= free + coming:
                self._start(model, now_s, decisions)
                free -= need
                continue
            chosen: list[FleetModel] = []
            for victim in self._victims(now_s, leaving | victims):
                if free + coming >= need:
                    break
                chosen.append(victim)
                coming += self.taken(victim)
            for victim in list(chosen):
                if free + coming - self.taken(victim) >= need:
                    chosen.remove(victim)
                    coming -= self.taken(victim)
            victims |= {victim.facts.name for victim in chosen}
            # It is next: freed memory is reserved for it, not for models behind it.
            coming -= need
        return {name for name in victims if now_s >= self.models[name].spell_ends_s}

    def _victims(self, now_s: float, chosen: set[str]) -> list[FleetModel]:
        """Candidates for unloading, in order: idle past their spell, busy past it, and those within their spell by its
        end; the least recently used first."""
        may = [
            model
            for name, model in self.models.items()
            if model.state in ("ready", "loading") and not model.facts.pin and name not in chosen
        ]
        return sorted(
            may,
            key=lambda model: (
                max(0.0, model.spell_ends_s - now_s),
                not model.is_idle,
                model.used_s,
            ),
        )

    def _grant_or_close(
        self, model: FleetModel, leaves: bool, now_s: float, decisions: list[Decision]
    ) -> None:
        if not leaves:
            model.closing_s = None
            for ticket in model.waiting:
                model.holds.add(ticket)
                model.keep_s = model.keeps.pop(ticket, model.keep_s)
                decisions.append(GrantRequest(ticket, model.facts.name))
            if model.waiting:
                model.used_s = now_s
            model.waiting.clear()
            return
        if model.closing_s is None:
            model.closing_s = now_s
        if model.holds:
            return
        if model.told_s >= model.closing_s and not model.requests:
            self._drain(model, now_s, decisions)
        elif now_s >= model.asked_s + LOOK_EVERY_S:
            model.asked_s = now_s
            decisions.append(LookAtWorker(model.facts.name))

    def _give_up_loading(self, model: FleetModel, now_s: float, decisions: list[Decision]) -> None:
        if model.started:
            self._drain(model, now_s, decisions)
        else:
            model.state, model.unload_wanted = "unloaded", False
            if model.removed:
                self._forget(model)

    def _drain(self, model: FleetModel, now_s: float, decisions: list[Decision]) -> None:
        if model.unload_wanted:
            model.rest_until_s = model.started_s + SPELL_LEAST_S
        model.state, model.drain_s, model.closing_s = "draining", now_s, None
        decisions.append(DrainWorker(model.facts.name))

    def _start(self, model: FleetModel, now_s: float, decisions: list[Decision]) -> None:
        model.state, model.started, model.started_s = "loading", True, now_s
        model.stage, model.fraction, model.running = "starting", None, model.facts.signature
        model.started_bytes = self.need(model)
        decisions.append(StartWorker(model.facts.name))

    # --- smaller parts -------------------------------------------------------------------------------------

    def _room(self) -> int:
        return self.budget_bytes - self.foreign_bytes

    def _wants_start(self, model: FleetModel) -> bool:
        return model.state == "unloaded" and model.wanted_since_s is not None

    def _known(self, name: str) -> FleetModel:
        model = self.models.get(name)
        if model is None or model.removed:
            raise UnknownModel(f"there is no model {name!r}")
        return model

    def _remove(self, model: FleetModel) -> None:
        """Remove a model from the list. Its running requests continue; waiting ones are refused."""
        model.removed = True
        model.wanted_s = None
        gone = UnknownModel(f"{model.facts.name!r} was taken off the list of models")
        for ticket in model.waiting:
            self._refused.append(RefuseRequest(ticket, gone))
            del self._tickets[ticket]
        model.waiting.clear()
        model.keeps.clear()
        if not model.started:
            self._forget(model)

    def _forget(self, model: FleetModel) -> None:
        for ticket in model.holds:
            self._tickets.pop(ticket, None)
        self.models.pop(model.facts.name, None)

    def _forget_failures(self, model: FleetModel) -> None:
        model.failures, model.start_at_s = 0, -inf
        model.exit_code, model.message = None, ""
        if model.state == "failed":
            model.state = "unloaded"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
