"""Models of a launcher: loaded when a request names them, and held until its response has ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

from zmqengine.protocol.launcher import ModelChanges, ModelEntry, no_such_model
from zmqengine_client.errors import UnknownModel, ZmqEngineError
from zmqengine_client.launcher import AsyncLauncher, OnLost
from zmqengine_http.serving.errors import ApiError, bad_field, no_worker
from zmqengine_http.serving.exchange import Scope
from zmqengine_http.workers.pool import LATEST, LOADED_MODEL, Pool
from zmqengine_http.workers.worker import ADAPTER_MARK, Connect, PooledWorker

LOOK_S = 0.5
"""Interval of checks that the launcher lives, while requests wait for a model."""
CHANGES_MAX = 256
"""Changes that a reader of events may be behind; then it is sent the whole list instead."""

ONLY_PATH = "/only/"
"""`/only/NAME/...` is this front-end with one model: SMG takes a worker for the first model that it lists, and some
clients name none."""
AZURE_PATH = "/openai/"
"""Azure's `/openai/deployments/NAME/...`, `/openai/v1/...` and `/openai/...` all stand for `/v1/...`."""
ONLY_KEY = "zmqengine.only"

Waiting = Callable[[], Awaitable[None]]
"""Called about twice a second while a request waits for its model."""


async def _send_nothing() -> None:
    """Keep no connection alive while a model loads."""


class LaunchedModels:
    """The models of this user's launcher, whose workers it keeps in the pool while they are loaded.

    While the launcher is away, loaded models are served, and requests for others wait for the next launcher.
    """

    def __init__(self, pool: Pool, connect: Connect, *, probe_ms: int, wait_ms: int) -> None:
        self.entries: dict[str, ModelEntry] = {}
        self.launcher = AsyncLauncher()
        self._pool = pool
        self._connect = connect
        self._probe_ms = probe_ms
        self._wait_s = wait_ms / 1000
        self._following: dict[str, tuple[PooledWorker, asyncio.Task[None]]] = {}
        self._readers: set[asyncio.Queue[ModelChanges]] = set()
        self._epoch = b""

    async def run(self) -> None:
        """Follow the list of models until cancelled."""
        try:
            async for changes in self.launcher.watch():
                self._take(changes)
        finally:
            for _, task in self._following.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._following.values()), return_exceptions=True)
            await self.launcher.close()

    def name_of(self, wanted: str | None) -> str:
        """The name on the list for what a request says; None and `default_model` are the only one that is loaded.

        Raises a 400 if that is not one model. A name that is not on the list is returned as it is.
        """
        if wanted is None or (wanted == LOADED_MODEL and wanted not in self.entries):
            ready = [name for name, entry in self.entries.items() if entry.state == "ready"]
            choice = ready if len(ready) == 1 else list(self.entries)
            if len(choice) != 1:
                raise bad_field("model", f"one of {', '.join(sorted(self.entries))} must be given")
            return choice[0]
        wanted = self._pool.named(wanted)
        if wanted not in self._names and wanted.endswith(LATEST):
            return wanted.removesuffix(LATEST)
        base, mark, _ = wanted.rpartition(ADAPTER_MARK)
        return base if mark and wanted not in self._names and base in self._names else wanted

    def entry(self, wanted: str) -> ModelEntry:
        """The entry of a name or alias. Raises a 404."""
        name = self._names.get(self.name_of(wanted))
        if name is None:
            raise ApiError(
                404,
                no_such_model(wanted, [*self.entries], self._names),
                param="model",
                code="model_not_found",
            )
        return self.entries[name]

    @contextlib.asynccontextmanager
    async def held(
        self, wanted: str | None, keep_alive_s: float | None = None, waiting: Waiting = _send_nothing
    ) -> AsyncIterator[PooledWorker]:
        """Load the model if need be; it is not unloaded for another one before the end.

        Raises a 404 with names that are spelt alike, a 503 with Retry-After when the bound on waiting is over, or the
        launcher's refusal. If the worker dies and cannot be started again, the requests there end with the reason.
        """
        name = self.name_of(wanted)
        call: int | None = None
        worker: PooledWorker | None = None
        lost: list[ZmqEngineError] = []

        def lose(error: ZmqEngineError) -> None:
            lost.append(error)
            if worker is not None:
                worker.fail(error)

        try:
            call, name = await self._want(name, keep_alive_s, waiting, lose)
            worker = self._follow(name)
            until_s = asyncio.get_running_loop().time() + self._wait_s
            while not worker.ready:
                if lost:
                    raise lost[0]
                if asyncio.get_running_loop().time() >= until_s:
                    raise no_worker(name)
                await worker.wait_ready(LOOK_S)
                await waiting()
            yield worker
        finally:
            if call is not None:
                self.launcher.free(call)

    async def load(self, wanted: str | None, keep_alive_s: float | None) -> str:
        """Wait until a model is loaded; returns its name. Raises what `held` raises."""
        async with self.held(wanted, keep_alive_s):
            return self.name_of(wanted)

    async def unload(self, wanted: str, *, pinned: bool) -> str:
        """Let a model go once the requests that wait or run now have ended; returns its name.

        Raises a 403 for a pinned one unless `pinned`.
        """
        name = self.name_of(wanted)
        entry = self.entries.get(self._names.get(name, ""))
        if entry is not None and entry.pin and not pinned:
            raise ApiError(
                403, f"{entry.name} is pinned: it stays loaded", param="model", code="model_pinned"
            )
        await self.launcher.unload(name)
        return name

    @contextlib.contextmanager
    def reading(self) -> Iterator[asyncio.Queue[ModelChanges]]:
        """A queue of changes from now on, which begins with the whole list."""
        queue: asyncio.Queue[ModelChanges] = asyncio.Queue()
        queue.put_nowait(self._everything())
        self._readers.add(queue)
        try:
            yield queue
        finally:
            self._readers.discard(queue)

    # --- the launcher --------------------------------------------------------------------------------------

    async def _want(
        self, name: str, keep_alive_s: float | None, waiting: Waiting, on_lost: OnLost
    ) -> tuple[int | None, str]:
        """The number to free the model by, and its name. Without a launcher a loaded model has no number."""
        asking = asyncio.ensure_future(
            self.launcher.want(name, timeout_s=self._wait_s, keep_alive_s=keep_alive_s, on_lost=on_lost)
        )
        try:
            while not asking.done():
                await asyncio.wait((asking,), timeout=LOOK_S)
                if asking.done():
                    break
                if not self.launcher.is_heard and self.entries:
                    # Nobody will say of a name that is not on the last list that there is no such model.
                    known = self.entry(name).name
                    if self._is_ready(known):
                        return None, known
                await waiting()
            call, granted = asking.result()
            return call, granted.model
        except UnknownModel as error:
            raise ApiError(404, error.message, param="model", code="model_not_found") from None
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    def _is_ready(self, name: str) -> bool:
        return name in self._following and self._following[name][0].ready

    @property
    def _names(self) -> Mapping[str, str]:
        names = {alias: name for name, entry in self.entries.items() for alias in entry.aliases}
        return names | {name: name for name in self.entries}

    def _take(self, changes: ModelChanges) -> None:
        if changes.epoch != self._epoch:
            # The first word of another launcher is its whole list.
            self._epoch = changes.epoch
            self.entries.clear()
        for name in changes.gone:
            self.entries.pop(name, None)
        for entry in changes.models:
            self.entries[entry.name] = entry
            if entry.state == "ready":
                self._follow(entry.name)
        self._pool.learn(self._names)
        for name in list(self._following):
            now = self.entries.get(name)
            if now is None or now.state in ("unloaded", "failed"):
                self._forget(name)
        for queue in self._readers:
            if queue.qsize() < CHANGES_MAX:
                queue.put_nowait(changes)
            else:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(self._everything())

    def _everything(self) -> ModelChanges:
        return ModelChanges(0, self._epoch or bytes(8), list(self.entries.values()))

    # --- the workers ---------------------------------------------------------------------------------------

    def _follow(self, name: str) -> PooledWorker:
        known = self._following.get(name)
        if known is not None:
            return known[0]
        entry = self.entries.get(name)
        if entry is None:
            # The grant came before the list.
            raise no_worker(name)
        worker = PooledWorker(entry.address, self._connect, self._probe_ms)
        self._following[name] = worker, asyncio.create_task(worker.run())
        self._pool.workers.append(worker)
        return worker

    def _forget(self, name: str) -> None:
        worker, task = self._following[name]
        if worker.running:
            # Its streams have not ended for the client: they wait for a worker at its address.
            return
        del self._following[name]
        self._pool.workers.remove(worker)
        task.cancel()


def keep_alive_of(document: dict[str, object]) -> float | None:
    """Take `keep_alive` (Ollama: seconds, or text such as `5m`) or `ttl` (LM Studio: seconds) from a body, in seconds.

    -1 is for ever. Raises a 400 for anything else.
    """
    return keep_alive_seconds(document.pop("ttl", None), document.pop("keep_alive", None))


def keep_alive_seconds(ttl: object, keep_alive: object) -> float | None:
    """Seconds of the two values, as `keep_alive_of` takes them from a body."""
    if keep_alive is not None:
        return _seconds("keep_alive", keep_alive)
    return None if ttl is None else _seconds("ttl", ttl)


def of_one_model(scope: Scope) -> Scope:
    """The scope of the path below `/only/NAME`, or of one of Azure's; of NAME a slash is written `--`."""
    path = scope["path"]
    if path.startswith(AZURE_PATH):
        rest = path.removeprefix(AZURE_PATH).removeprefix("v1/")
        if not rest.startswith("deployments/"):
            return {**scope, "path": f"/v1/{rest}"}
        name, _, rest = rest.removeprefix("deployments/").partition("/")
        return {**scope, "path": f"/v1/{rest}", ONLY_KEY: name}
    name, _, rest = path.removeprefix(ONLY_PATH).partition("/")
    return {**scope, "path": f"/{rest}", ONLY_KEY: name}


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9.]+)(ms|s|m|h)")
"""A part of a duration in Go's notation, in which Ollama's programs write five minutes as `5m0s`."""


def _duration_s(text: str) -> float:
    """Seconds of a number, or of a duration. Raises ValueError."""
    sign, parts = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    seconds, at = 0.0, 0
    while part := _PART.match(parts, at):
        seconds += float(part[1]) * _UNITS_S[part[2]]
        at = part.end()
    return sign * seconds if at and at == len(parts) else float(text)


def _seconds(name: str, value: object) -> float:
    try:
        seconds = _duration_s(value.strip() if isinstance(value, str) else str(value))
    except ValueError:
        seconds = math.nan
    if isinstance(value, bool) or not math.isfinite(seconds) or seconds > 1e9:
        raise bad_field(name, "seconds, or text such as 5m; 0 unloads, -1 keeps for ever")
    return -1.0 if seconds < 0 else seconds
