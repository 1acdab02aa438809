"""The launcher: one event loop that owns the state of all models, starts and follows their workers, and answers
front-ends.

Workers are processes in sessions of their own. They survive the launcher, and the next one finds them by their records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from math import inf
from pathlib import Path

from zmqengine.checkpoint.estimate import ACTIVATION_SHARE
from zmqengine.errors import Draining, NeverFits, ZmqEngineError
from zmqengine.protocol.launcher import LauncherReply, ModelEntry, ModelList, ModelProgress
from zmqengine.protocol.messages import Description
from zmqengine.serve import child, gateway
from zmqengine.serve.child import Child, Record
from zmqengine.serve.control_socket import ControlSocket
from zmqengine.serve.entries import Entry, ModelOffer, directory_name
from zmqengine.serve.fleet import (
    DrainWorker,
    Fleet,
    GrantRequest,
    KillWorker,
    LookAtWorker,
    RefuseRequest,
    StartWorker,
)
from zmqengine.serve.follower import Follower
from zmqengine.serve.front_end import HttpFrontEnd
from zmqengine.serve.gateway import GatewayRegistration
from zmqengine.serve.measured import MeasuredMemory
from zmqengine.serve.model import FleetModel
from zmqengine.worker.process.memory_share import live_claims
from zmqengine.worker.process.parent import (
    EXIT_FAILED,
    EXIT_HOPELESS,
    EXIT_USAGE,
    WORKER_COMMAND,
    WORKER_CONFIG,
)

log = logging.getLogger("zmqengine.launcher")

BEAT_S = 1.0
TOUCH_S = 3600.0
KILL_AFTER_S = 5.0
"""Seconds beyond the drain time of its workers, then they are killed."""


class Launcher:
    """Serves the models of an offer until it is stopped. `root`: directory of all sockets and records.

    `read` reads the offer again. The front-end serves beside it. With a `registration` the models are kept at its
    gateway. Raises `ConfigError` if another launcher has `root`.
    """

    def __init__(
        self,
        root: Path,
        read: Callable[[], ModelOffer],
        budget_bytes: int,
        *,
        claims: Path,
        front_end: HttpFrontEnd | None = None,
        registration: GatewayRegistration | None = None,
    ) -> None:
        self._root = root
        self._read = read
        self._budget_bytes = budget_bytes
        self._claims = claims
        self._front_end = front_end
        self._gateway = registration
        self._offer = read()
        self._measured = MeasuredMemory()
        self._fleet = Fleet(self._offer.budget_bytes or budget_bytes)
        self._control = ControlSocket(root, self)
        self._followers: dict[str, Follower] = {}
        # By model: the signature of its last worker's options, and the adapters that it had.
        self._adapters: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._acting = False
        self._stops = 0
        self._code = 0
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reads the offer again. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._keep(self._reload_on_signal()))
        self._adopt()
        self._configure(self._offer)
        # A request before that would meet a list without models, and start a second worker for one that runs.
        self._control.open()
        beating = asyncio.create_task(self._beat())
        registering = asyncio.create_task(self._register())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((beating, stopping), return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                beating.result()
            return self._code
        finally:
            self._stopping.set()
            beating.cancel()
            registering.cancel()
            if self._gateway is not None:
                await self._gateway.keep(())
            await self._end_all()
            self._control.close()

    def stop(self) -> None:
        """Let the front-end and workers finish what runs, refuse what waits, then end. The second time they end at
        once."""
        self._stops += 1
        if self._stops == 1:
            running = sum(max(model.requests, len(model.holds)) for model in self._fleet.models.values())
            log.info("stopping; a second time ends running requests at once", extra={"running": running})
        self._stopping.set()
        for model in self._fleet.models.values():
            for ticket in list(model.waiting):
                self._fleet.release(ticket, time.monotonic())
                self._control.refuse(ticket, Draining("the launcher is stopping"))
        if self._stops > 1:
            for process in self._processes():
                process.send(signal.SIGTERM)

    # --- for the control socket ----------------------------------------------------------------------------

    def list_models(self, call: int) -> ModelList:
        fleet = self._fleet
        return ModelList(
            call,
            self._control.epoch,
            self.entries(),
            budget_bytes=fleet.budget_bytes,
            reserved_bytes=fleet.reserved_bytes,
            foreign_bytes=fleet.foreign_bytes,
            http="" if self._front_end is None else self._front_end.url,
        )

    def entries(self) -> list[ModelEntry]:
        return [
            self._model_entry(entry, self._fleet.models[name]) for name, entry in self._offer.entries.items()
        ]

    def want(self, ticket: int, model: str, keep_alive_s: float | None) -> None:
        """A request needs a model."""
        if self._stopping.is_set():
            raise Draining("the launcher is stopping")
        entry = self._offer.find(model)
        self._fleet.acquire(ticket, entry.name, time.monotonic(), keep_s=_keep_s(keep_alive_s))
        self._act()

    def free(self, ticket: int) -> None:
        """That request has ended."""
        self._fleet.release(ticket, time.monotonic())
        self._act_soon()

    def load(self, model: str, keep_alive_s: float | None) -> None:
        """Load a model by command."""
        entry = self._offer.find(model)
        self._fleet.load(entry.name, time.monotonic(), keep_s=_keep_s(keep_alive_s))
        self._act()

    def unload(self, model: str) -> None:
        """Unload a model by command."""
        self._fleet.unload(self._offer.find(model).name, time.monotonic())
        self._act()

    async def reload(self) -> None:
        """Read the offer again. Raises `ConfigError`, and keeps the earlier one then."""
        offer = await asyncio.to_thread(self._read)
        self._configure(offer)
        log.info("the list of models was read again", extra={"models": len(offer.entries)})

    # --- for the followers ---------------------------------------------------------------------------------

    def described(self, name: str, description: Description) -> None:
        """Handle a worker's progress."""
        if name not in self._fleet.models:
            return
        follower = self._followers.get(name)
        if follower is not None:
            follower.child.learn_pid(description.pid)
        if description.state in ("ready", "draining"):
            was = self._fleet.models[name].state
            self._fleet.became_ready(name, time.monotonic())
            if was == "loading" and self._fleet.models[name].state == "ready":
                log.info("ready", extra={"model": name, "seconds": round(self._fleet.models[name].load_s, 1)})
        else:
            progress = description.progress
            self._fleet.progressed(name, progress.stage, progress.fraction)
        self._act()

    def told(self, name: str, requests: int, asked_s: float, held_bytes: int, adapters: list[str]) -> None:
        """Handle a worker's status."""
        if name in self._fleet.models:
            if name in self._followers:
                self._adapters[name] = self._followers[name].child.record.signature, tuple(adapters)
            self._fleet.told(name, requests, asked_s, held_bytes=held_bytes)
            self._act()

    def ended(self, name: str) -> None:
        """Handle the end of a worker's process."""
        follower = self._followers.pop(name)
        process = follower.child
        self._keep(follower.close())
        model = self._fleet.models.get(name)
        if model is None:
            return
        self._measured.keep(model.running, model.measured_bytes)
        words = "" if process.code == 0 else process.last_words()
        expected = model.state == "draining"
        now_s = time.monotonic()
        hopeless = process.code in (EXIT_HOPELESS, EXIT_USAGE)
        self._fleet.exited(name, process.code, words, now_s, hopeless=hopeless)
        level = logging.INFO if expected or process.code == 0 else logging.WARNING
        said = {"last_words": words} if words else {}
        log.log(level, "ended", extra={"model": name, "exit_code": process.code, **said})
        self._act()

    # --- acting --------------------------------------------------------------------------------------------

    def _act_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        """Carry out decisions until none is due."""
        if self._acting:
            # Called while a decision is carried out: the loop below handles it.
            return
        self._acting = True
        try:
            now_s = time.monotonic()
            grants: list[GrantRequest] = []
            while not self._stopping.is_set() and (decisions := self._fleet.advance(now_s)):
                for decision in decisions:
                    if isinstance(decision, GrantRequest):
                        grants.append(decision)
                    else:
                        self._carry_out(decision)
            # Before the grants: a front-end that may use a model knows that it is loaded.
            self._control.tell_changes()
            for grant in grants:
                address = self._offer.entries[grant.name].config.endpoints.ctl
                self._control.grant(grant.ticket, grant.name, address)
        finally:
            self._acting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._fleet.next_s(now_s)
        if next_s < inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, next_s - time.monotonic()), self._act)

    def _carry_out(self, decision: object) -> None:
        match decision:
            case StartWorker(name):
                self._start(name)
            case LookAtWorker(name):
                self._followers[name].look_now()
            case DrainWorker(name):
                log.info("unloading", extra={"model": name})
                self._followers[name].child.send(signal.SIGTERM)
            case KillWorker(name):
                log.error("a worker did not end: killing it", extra={"model": name})
                self._followers[name].child.send(signal.SIGKILL)
            case RefuseRequest(ticket, error):
                self._control.refuse(ticket, error)

    def _start(self, name: str) -> None:
        entry = self._offer.entries[name]
        model = self._fleet.models[name]
        record = Record(name, model.running, entry.config.endpoints.ctl)
        # Not a part of the signature: a new measurement of the need is no reason to start a worker again.
        adapters = tuple(f"{each}={path}" for each, path in self._adapters_of(entry).items())
        config = dataclasses.replace(
            entry.config, memory_least_bytes=self._fleet.need(model), adapter=adapters
        )
        environment = {WORKER_CONFIG: config.to_json()}
        try:
            process = child.start(self._record_path(name), record, WORKER_COMMAND, environment)
        except OSError as error:
            log.error("cannot start a worker", extra={"model": name, "reason": str(error)})
            self._fleet.exited(name, None, f"its process cannot be started: {error}", time.monotonic())
            return
        log.info("loading", extra={"model": name, "pid": process.record.pid, "log": process.log})
        self._followers[name] = Follower(process, self)

    def _adapters_of(self, entry: Entry) -> dict[str, Path]:
        """The adapters that a model's last worker had, with the options of today, or those of its options."""
        signature, adapters = self._adapters.get(entry.name, ("", ()))
        if signature != entry.facts.signature:
            return entry.config.adapters
        # The next worker goes on without one whose files are gone.
        had = dataclasses.replace(entry.config, adapter=adapters).adapters
        return {name: path for name, path in had.items() if (path / "adapter_config.json").is_file()}

    def _configure(self, offer: ModelOffer) -> None:
        self._offer = offer
        self._fleet.budget_bytes = offer.budget_bytes or self._budget_bytes
        self._fleet.configure([entry.facts for entry in offer.entries.values()], time.monotonic())
        for model in self._fleet.models.values():
            known = self._measured.of(model.facts.signature)
            model.measured_bytes = max(model.measured_bytes if model.is_loaded else 0, known)
            refusal = self._fleet.refusal(model) if model.wanted_s is not None else None
            if refusal is not None:
                log.warning("not preloaded: %s", refusal)
        self._act()

    def _adopt(self) -> None:
        """Take over the workers of an earlier launcher."""
        now_s = time.monotonic()
        entries = self._offer.entries
        self._fleet.configure([entry.facts for entry in entries.values()], now_s)
        by_file = {directory_name(name): name for name in entries}
        for path in sorted(self._root.glob("*.json")):
            process = child.find(path)
            if process is None:
                continue
            if path.stem not in by_file:
                log.warning("a worker is off the list: letting it go", extra={"model": process.record.name})
                process.send(signal.SIGTERM)
                continue
            name = by_file[path.stem]
            self._fleet.adopt(name, process.record.signature, now_s)
            self._followers[name] = Follower(process, self)
            log.info("adopted", extra={"model": name, "pid": process.record.pid})

    # --- once a second -------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        touched_s = time.monotonic()
        while True:
            self._look_at_claims()
            if self._front_end is not None and not self._front_end.keep():
                self._front_end, self._code = None, EXIT_FAILED
                self.stop()
            self._act()
            self._control.beat(self._progress)
            for process in self._processes():
                process.rotate_log()
            is_due = time.monotonic() >= touched_s + TOUCH_S
            self._control.keep_files(touch=is_due)
            if is_due:
                touched_s = time.monotonic()
                for process in self._processes():
                    process.touch()
            await asyncio.sleep(BEAT_S)

    async def _register(self) -> None:
        """Register the models that can be loaded here at the gateway."""
        while self._gateway is not None:
            models = self._fleet.models.values()
            await self._gateway.keep(
                model.facts.name
                for model in models
                if model.state != "failed" and not model.facts.never and not model.removed
            )
            await asyncio.sleep(gateway.LOOK_S)

    def _look_at_claims(self) -> None:
        ours = {follower.child.record.pid for follower in self._followers.values()}
        try:
            claims = live_claims(self._claims)
        except OSError:
            return
        self._fleet.set_foreign(
            sum(
                int(claim.weights_bytes / (1 - ACTIVATION_SHARE))
                if claim.limit_bytes is None
                else claim.limit_bytes
                for claim in claims
                if claim.pid not in ours
            )
        )

    def _progress(self, ticket: int, call: int) -> LauncherReply | None:
        model = next((each for each in self._fleet.models.values() if ticket in each.waiting), None)
        if model is None:
            return None
        before = [] if model.is_loaded else self._fleet.before(model)
        return ModelProgress(
            call, self._control.epoch, model.facts.name, model.state, model.stage, model.fraction, before
        )

    async def _reload_on_signal(self) -> None:
        try:
            await self.reload()
        except ZmqEngineError as error:
            log.error("the list of models is unchanged: %s", error)

    # --- the end -------------------------------------------------------------------------------------------

    def _processes(self) -> list[Child]:
        return [*self._served_by(), *(follower.child for follower in self._followers.values())]

    def _served_by(self) -> list[Child]:
        front_end = self._front_end
        return [] if front_end is None or front_end.process is None else [front_end.process]

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        """Run a task, and refer to it until its end: the event loop itself holds only a weak reference."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_all(self) -> None:
        """The front-end first, so that what it has begun ends well; then the workers."""
        if self._timer is not None:
            self._timer.cancel()
        drain_s = max((entry.config.drain_timeout_s for entry in self._offer.entries.values()), default=30.0)
        workers = [follower.child for follower in self._followers.values()]
        for follower in list(self._followers.values()):
            await follower.close()
        for processes in (self._served_by(), workers):
            for process in processes:
                process.send(signal.SIGTERM)
            until_s = time.monotonic() + drain_s + KILL_AFTER_S
            while any(not process.has_ended() for process in processes) and time.monotonic() < until_s:
                await asyncio.sleep(0.05)
            for process in processes:
                process.send(signal.SIGKILL)

    def _record_path(self, name: str) -> Path:
        return self._root / f"{directory_name(name)}.json"

    def _model_entry(self, entry: Entry, model: FleetModel) -> ModelEntry:
        follower = self._followers.get(entry.name)
        expires_s = model.expires_s - time.monotonic()
        refusal = self._fleet.refusal(model)
        return ModelEntry(
            name=entry.name,
            state=model.state,
            address=entry.config.endpoints.ctl,
            aliases=list(entry.aliases),
            path=entry.config.model,
            model_type=entry.model_type,
            quantisation=entry.quantisation,
            context_tokens=entry.context_tokens,
            capabilities=list(entry.capabilities),
            adapters=list(self._adapters_of(entry)),
            size_bytes=entry.size_bytes,
            need_bytes=self._fleet.need(model),
            stage=model.stage,
            fraction=model.fraction,
            exit_code=model.exit_code,
            message=model.message,
            never=entry.never or (refusal.message if isinstance(refusal, NeverFits) else ""),
            pin=entry.pin,
            ttl_s=-1.0 if model.keep_s == inf else model.keep_s,
            expires_s=None if expires_s == inf else float(round(expires_s)),
            waiting=len(model.waiting),
            requests=max(model.requests, len(model.holds)),
            loads=model.loads,
            load_s=round(model.load_s, 2),
            pid=None if follower is None else follower.child.record.pid,
        )


def _keep_s(given: float | None) -> float | None:
    return inf if given is not None and given < 0 else given
