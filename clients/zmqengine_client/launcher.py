"""Requests to a launcher: addresses, progress and the list of models."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import zmq

from zmqengine.errors import (
    AnswerTimeout,
    ModelLoadError,
    NotReady,
    UnknownModel,
    WorkerLost,
    ZmqEngineError,
    from_code,
)
from zmqengine.protocol.codec import encode
from zmqengine.protocol.launcher import (
    NAME_CHARS_MAX,
    FreeModel,
    LauncherBeat,
    LauncherReply,
    LauncherRequest,
    ListModels,
    LoadModel,
    ModelAddress,
    ModelChanges,
    ModelList,
    ModelProgress,
    ReloadList,
    UnloadModel,
    WantModel,
    WatchModels,
    launcher_address,
    launcher_reply_decoder,
)
from zmqengine.protocol.messages import Done, Rejected
from zmqengine_client.loop_socket import LoopSocket

ANSWER_S = 5.0
WANT_S = 600.0
SILENCE_S = 3.0
"""After this time without a beat, pending requests are sent again: there may be another launcher."""
LINGER_MS = 100

ReplyT = TypeVar("ReplyT")
OnProgress = Callable[[ModelProgress], None]
OnLost = Callable[[ZmqEngineError], None]


@dataclass(slots=True)
class _Want:
    request: WantModel
    granted: asyncio.Future[ModelAddress]
    on_progress: OnProgress | None = None
    on_lost: OnLost | None = None


@dataclass(slots=True)
class _Watch:
    request: WatchModels
    changes: asyncio.Queue[ModelChanges] = field(default_factory=asyncio.Queue)


class AsyncLauncher:
    """A connection to a launcher for the tasks of one event loop; None is the launcher of this user.

    If the launcher dies, pending requests are sent again to the next one. Every call raises
    `WorkerLost` if no launcher answers in time, or the error that the launcher refuses it with.
    """

    def __init__(self, address: str | None = None, *, answer_timeout_s: float = ANSWER_S) -> None:
        self._address = address or launcher_address()
        self._answer_s = answer_timeout_s
        self._calls = itertools.count(1)
        self._answers: dict[int, asyncio.Future[LauncherReply]] = {}
        self._wants: dict[int, _Want] = {}
        self._watches: dict[int, _Watch] = {}
        self._decoder = launcher_reply_decoder()
        self._socket: LoopSocket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._epoch = b""

    async def __aenter__(self) -> AsyncLauncher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Free every model and close the socket. Idempotent."""
        for call in list(self._wants):
            self.free(call)
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close(LINGER_MS)
            self._socket = None

    @property
    def is_heard(self) -> bool:
        """Whether a launcher has sent a message in the last seconds."""
        return time.monotonic() < self._heard_s + SILENCE_S

    async def models(self) -> ModelList:
        """All models, and the memory."""
        return await self._ask(ListModels(next(self._calls)), ModelList)

    async def load(self, model: str, *, keep_alive_s: float | None = None) -> None:
        """Begin to load a model; `watch` or `models` report its progress."""
        await self._ask(LoadModel(next(self._calls), _checked(model), keep_alive_s), Done)

    async def unload(self, model: str) -> None:
        """Unload a model once its running requests have ended."""
        await self._ask(UnloadModel(next(self._calls), _checked(model)), Done)

    async def reload(self) -> None:
        """Make the launcher read its list again. Raises `ConfigError` for an error in it."""
        await self._ask(ReloadList(next(self._calls)), Done)

    async def want(
        self,
        model: str,
        *,
        timeout_s: float = WANT_S,
        keep_alive_s: float | None = None,
        on_progress: OnProgress | None = None,
        on_lost: OnLost | None = None,
    ) -> tuple[int, ModelAddress]:
        """Wait until a model is ready; it stays until `free` is called with the number that is returned.

        `on_lost` is called with the reason if the worker dies later and cannot be started again.
        Raises `UnknownModel`, `NeverFits`, `ModelLoadError`, `Overloaded`, or `NotReady` when the time is over.
        """
        call = next(self._calls)
        want = _Want(
            WantModel(call, _checked(model), keep_alive_s),
            asyncio.get_running_loop().create_future(),
            on_progress,
            on_lost,
        )
        self._wants[call] = want
        self._send(want.request)
        try:
            done, _ = await asyncio.wait((want.granted,), timeout=timeout_s)
            if not done and not self.is_heard:
                raise WorkerLost(f"no launcher answers at {self._address}: start one with zmqengine serve")
            if not done:
                raise NotReady(f"{model} is not ready after {timeout_s:.0f} s", retry_after_ms=10_000)
            return call, want.granted.result()
        except BaseException:
            self.free(call)
            raise

    def free(self, call: int) -> None:
        """Release a model that `want` has granted. Idempotent; never waits."""
        if self._wants.pop(call, None) is not None:
            self._send(FreeModel(next(self._calls), call))

    async def watch(self) -> AsyncIterator[ModelChanges]:
        """Changes of models; first all models, also after a launcher was replaced."""
        call = next(self._calls)
        watch = self._watches[call] = _Watch(WatchModels(call))
        self._send(watch.request)
        try:
            while True:
                yield await watch.changes.get()
        finally:
            del self._watches[call]
            self._send(FreeModel(next(self._calls), call))

    # --- the socket ----------------------------------------------------------------------------------------

    async def _ask(self, request: LauncherRequest, kind: type[ReplyT]) -> ReplyT:
        answer: asyncio.Future[LauncherReply] = asyncio.get_running_loop().create_future()
        self._answers[request.call] = answer
        try:
            self._send(request)
            reply = await asyncio.wait_for(answer, self._answer_s)
        except asyncio.TimeoutError:
            raise WorkerLost(
                f"no launcher answers at {self._address}: start one with zmqengine serve"
            ) from None
        finally:
            del self._answers[request.call]
        if not isinstance(reply, kind):
            raise AnswerTimeout(f"the launcher answered with {type(reply).__name__}")
        return reply

    def _send(self, request: LauncherRequest) -> None:
        if self._socket is None:
            self._socket = self._open()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(encode(request))

    def _open(self) -> LoopSocket:
        opened = LoopSocket(zmq.DEALER, self._read)
        opened.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        opened.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        opened.socket.connect(self._address)
        self._look()
        return opened

    def _look(self) -> None:
        """Check every few seconds whether the launcher answers."""
        if (self._wants or self._watches) and not self.is_heard and self._socket is not None:
            self._ask_again()
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S, self._look)

    def _read(self, frames: list[bytes]) -> None:
        with contextlib.suppress(ZmqEngineError):
            self._receive(self._decoder.decode(frames))

    def _receive(self, message: LauncherReply) -> None:
        self._heard_s = time.monotonic()
        if message.epoch != self._epoch:
            is_new, self._epoch = bool(self._epoch), message.epoch
            if is_new:
                self._ask_again()
        if isinstance(message, LauncherBeat):
            return
        call = message.call
        want = self._wants.get(call)
        if isinstance(message, ModelProgress):
            if want is not None and want.on_progress is not None:
                want.on_progress(message)
        elif isinstance(message, ModelChanges):
            if call in self._watches:
                self._watches[call].changes.put_nowait(message)
        elif want is not None and isinstance(message, Rejected):
            self._refused(call, want, _error(message))
        elif want is not None:
            if isinstance(message, ModelAddress) and not want.granted.done():
                want.granted.set_result(message)
        elif call in self._answers and not self._answers[call].done():
            answer = self._answers[call]
            if isinstance(message, Rejected):
                answer.set_exception(_error(message))
            else:
                answer.set_result(message)

    def _refused(self, call: int, want: _Want, error: ZmqEngineError) -> None:
        del self._wants[call]
        if not want.granted.done():
            want.granted.set_exception(error)
        elif want.on_lost is not None and isinstance(error, ModelLoadError):
            # After any other refusal, as when the model has left the list, the worker finishes its running requests.
            want.on_lost(error)

    def _ask_again(self) -> None:
        """Send grants and pending requests again: another launcher does not know them."""
        for want in self._wants.values():
            self._send(want.request)
        for watch in self._watches.values():
            self._send(watch.request)


def _checked(name: str) -> str:
    """The name. Raises `UnknownModel` for one that no model has: libzmq ends a connection that sends megabytes."""
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        raise UnknownModel(
            f"The model {name[:100]!r}... does not exist: a name has 1 to {NAME_CHARS_MAX} characters"
        )
    return name


def _error(rejected: Rejected) -> ZmqEngineError:
    return from_code(rejected.code, rejected.message, retry_after_ms=rejected.retry_after_ms)
