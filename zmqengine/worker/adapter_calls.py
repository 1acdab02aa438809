"""The model's adapters: loaded and unloaded for operators while requests run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from zmqengine.engine.adapter_files import AdapterFiles, read_files
from zmqengine.engine.interface import Engine, VectorEngine
from zmqengine.errors import BadRequest, Conflict, Draining, InternalError, ModelLoadError, ZmqEngineError
from zmqengine.protocol.messages import ADAPTER_FACT, Done, Insert, Rejected
from zmqengine.worker.context import WorkerContext
from zmqengine.worker.requests.live_request import LiveRequest
from zmqengine.worker.scheduler.scheduler import Scheduler
from zmqengine.worker.telemetry.shared_status import AdapterCall

log = logging.getLogger("zmqengine.worker")


class WorkerAdapters:
    """Loads an adapter in two parts: a thread reads its files, which a slow disk may delay, then the actor gives their
    arrays to the engine between two steps. An adapter is unloaded for new requests at once, and leaves the memory with
    the last request that uses it."""

    def __init__(self, context: WorkerContext, engine: Engine | VectorEngine, scheduler: Scheduler) -> None:
        self._context = context
        self._engine = engine if isinstance(engine, Engine) else None
        self._scheduler = scheduler
        self._directories = {name: str(path) for name, path in context.config.adapters.items()}
        self._digests = dict(engine.info.adapters)
        self._leaving: set[str] = set()
        # Calls that wait for an adapter, by its name; a front-end repeats a call until it is answered.
        self._reading: dict[str, list[AdapterCall]] = {}
        self._read: deque[tuple[str, AdapterFiles | ZmqEngineError]] = deque()
        self._tell_facts()

    @property
    def usable(self) -> Mapping[str, str]:
        """Digests of the adapters that a new request may have, by name."""
        return {name: digest for name, digest in self._digests.items() if name not in self._leaving}

    def digest(self, name: str) -> str:
        """The digest of an adapter that a new request may have. Raises `BadRequest`."""
        usable = self.usable
        if name not in usable:
            told = ", ".join(usable) or "none"
            raise BadRequest(f"adapter: the model has no {name[:100]!r}, it has {told}")
        return usable[name]

    def advance(self, live: Callable[[], Sequence[LiveRequest]]) -> None:
        """Take operators' calls, load what has been read, and unload what none of the `live` requests has. Called once
        a pass."""
        calls = self._context.shared_status.adapter_calls
        while calls:
            call = calls.popleft()
            try:
                self._take(call)
            except ZmqEngineError as error:
                self._answer([call], error)
        while self._read:
            name, files = self._read.popleft()
            waiting = self._reading.pop(name)
            try:
                if isinstance(files, ZmqEngineError):
                    raise files
                self._load(files, str(waiting[0].directory), live())
            except ZmqEngineError as error:
                self._answer(waiting, error)
            else:
                self._answer(waiting)
        if self._leaving:
            requests = live()
            in_use = {each.insert.adapter for each in requests if isinstance(each.insert, Insert)}
            for name in self._leaving - in_use:
                self._unload(name, requests)

    def _take(self, call: AdapterCall) -> None:
        """Raises the error of a refusal."""
        name, directory = call.name, call.directory
        reading = self._reading.get(name)
        if directory is None:
            if reading is not None:
                raise Conflict(f"the adapter {name} is being loaded")
            if name in self._digests:
                self._leaving.add(name)
                self._publish()
            self._answer([call])
            return
        if reading is not None:
            if reading[0].directory != directory:
                raise Conflict(f"the adapter {name} is being loaded from {reading[0].directory}")
            reading.append(call)
            return
        if self._engine is None:
            raise ModelLoadError(f"the adapter {name}: the model writes no text")
        if name in self._leaving:
            raise Conflict(f"the adapter {name} is being unloaded: requests still use it")
        if self._context.shared_status.told_state == "draining":
            raise Draining("the worker is draining: it loads no adapters")
        self._reading[name] = [call]
        threading.Thread(
            target=self._read_files, args=(name, Path(directory)), name="adapter", daemon=True
        ).start()

    def _read_files(self, name: str, directory: Path) -> None:
        files: AdapterFiles | ZmqEngineError
        try:
            files = read_files(name, directory)
        except ModelLoadError as error:
            files = error
        except Exception as error:
            log.error("reading an adapter failed", extra={"adapter": name}, exc_info=error)
            files = InternalError(f"reading the adapter {name} failed; see the worker's log")
        self._read.append((name, files))
        self._context.shared_status.wakeup.wake()

    def _load(self, files: AdapterFiles, directory: str, live: Sequence[LiveRequest]) -> None:
        """Raises the error of a refusal."""
        name, engine = files.name, self._engine
        assert engine is not None, "it was asked for"
        if name in self._digests:
            if self._digests[name] == files.digest:
                return
            raise Conflict(f"the adapter {name} is loaded with other contents: unload it first")

        def make_room(bytes_: int) -> None:
            self._scheduler.make_room(bytes_, f"the adapter {name}", live)

        before = engine.info.parameter_bytes
        try:
            engine.load_adapter(files, make_room)
        except ZmqEngineError:
            raise
        except Exception as error:
            log.error("loading an adapter failed", extra={"adapter": name}, exc_info=error)
            raise InternalError(f"loading the adapter {name} failed; see the worker's log") from error
        finally:
            self._scheduler.refit(live)
        self._digests[name], self._directories[name] = files.digest, directory
        self._publish()
        bytes_ = engine.info.parameter_bytes - before
        log.info("adapter loaded", extra={"adapter": name, "directory": directory, "bytes": bytes_})

    def _unload(self, name: str, live: Sequence[LiveRequest]) -> None:
        engine = self._engine
        assert engine is not None, "it has adapters"
        self._leaving.discard(name)
        try:
            engine.unload_adapter(name)
        except Exception as error:
            log.error("an adapter could not be unloaded: it stays", extra={"adapter": name}, exc_info=error)
            self._publish()
            return
        self._scheduler.refit(live)
        del self._digests[name]
        self._directories.pop(name, None)
        self._publish()
        log.info("adapter unloaded", extra={"adapter": name})

    def _publish(self) -> None:
        """Tell front-ends what a request may have, and the supervisor what the next process needs: one that is in use
        still, too."""
        status = self._context.shared_status
        if status.model is not None:
            assert self._engine is not None, "it has adapters"
            weights_bytes = self._engine.info.parameter_bytes
            status.model = msgspec.structs.replace(
                status.model, adapters=list(self.usable), parameter_bytes=weights_bytes
            )
        self._tell_facts()
        self._context.report_adapters([f"{name}={path}" for name, path in self._directories.items()])

    def _tell_facts(self) -> None:
        """Show operators, and a launcher that starts this worker again, the directory of each."""
        status = self._context.shared_status
        others = {name: fact for name, fact in status.facts.items() if not name.startswith(ADAPTER_FACT)}
        status.facts = others | {f"{ADAPTER_FACT}{name}": path for name, path in self._directories.items()}

    def _answer(self, calls: Sequence[AdapterCall], error: ZmqEngineError | None = None) -> None:
        status = self._context.shared_status
        for route, call, *_ in calls:
            if error is None:
                status.answer(route, Done(call, status.epoch))
            else:
                wait_ms = error.retry_after_ms
                refusal = Rejected(call, status.epoch, error.code, error.message, retry_after_ms=wait_ms)
                status.answer(route, refusal)
