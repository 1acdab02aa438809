"""Holds requests and calls back until a launcher has loaded their model, and releases it after their end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf

from zmqengine.errors import NotReady, WorkerLost, ZmqEngineError, from_code
from zmqengine.protocol.codec import encode
from zmqengine.protocol.launcher import (
    FreeModel,
    LauncherReply,
    ListModels,
    ModelAddress,
    ModelList,
    ModelProgress,
    WantModel,
    launcher_reply_decoder,
    only_model,
)
from zmqengine.protocol.messages import Rejected
from zmqengine_client.core.connection import SessionConfig
from zmqengine_client.core.control import ControlCall
from zmqengine_client.core.outbox import ClientEvent, OpenControl, Outbox, Send
from zmqengine_client.core.request import Request

SILENCE_S = 3.0
"""Seconds without a beat after which the model is requested again: there may be another launcher (SPEC.md)."""
LINGER_S = 1.0
"""Seconds from the last request to the release of the model: the next request mostly comes sooner."""
RETRY_AFTER_MS = 10_000


class ModelGate:
    """Open while the launcher keeps the model loaded for this client; without a name it is the only one.

    `waiting`: requests and calls held back while it is closed, in order.
    """

    def __init__(self, model: str, config: SessionConfig, outbox: Outbox) -> None:
        self.is_open = False
        self.waiting: list[Request | ControlCall] = []
        self._model = model
        self._config = config
        self._outbox = outbox
        self._decode = launcher_reply_decoder().decode
        self._calls = count(1)
        self._call: int | None = None
        self._address = ""
        self._epoch = b""
        self._since = self._repeat_at = self._heard_at = -inf
        self._idle_at = inf
        self._told = ""

    def add(self, item: Request | ControlCall, now: float) -> None:
        """Hold an item back until the model is loaded."""
        self.waiting.append(item)
        if self._call is None:
            self._call = next(self._calls)
            self._since, self._heard_at = now, -inf
            self._want(now)

    def take(self) -> list[Request | ControlCall]:
        """Remove and return the waiting items."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def receive(self, frames: Sequence[bytes], now: float) -> ZmqEngineError | None:
        """A message of the launcher. Returns the error with which it refuses the model. May open the gate."""
        message: LauncherReply = self._decode(frames)
        self._heard_at = now
        if message.epoch != self._epoch:
            is_new, self._epoch = bool(self._epoch), message.epoch
            if is_new and self._call is not None:
                self._want(now)
        if isinstance(message, ModelAddress) and message.call == self._call:
            self.is_open = True
            if message.address != self._address:
                self._address = message.address
                self._outbox.actions.append(OpenControl(message.address))
        elif isinstance(message, ModelList) and message.call == self._call:
            return self._choose(message, now)
        elif isinstance(message, ModelProgress) and message.call == self._call:
            self._tell(message)
        elif isinstance(message, Rejected) and message.call == self._call:
            self._call, self.is_open = None, False
            return from_code(message.code, message.message, retry_after_ms=message.retry_after_ms)
        return None

    def advance(self, now: float, *, is_busy: bool) -> ZmqEngineError | None:
        """Carry out the actions that are due; returns the error that ends the wait, if any.

        `is_busy`: requests or calls are under way.
        """
        if self._call is None:
            return None
        if self.waiting and (error := self._given_up(now)) is not None:
            self._free()
            return error
        self._idle_at = inf if is_busy or self.waiting else min(self._idle_at, now + LINGER_S)
        if now >= self._idle_at:
            self._free()
        elif now >= max(self._repeat_at, self._heard_at + SILENCE_S):
            self._want(now)
        return None

    def next_deadline(self) -> float:
        """The time of the next `advance`; infinity while nothing is wanted."""
        if self._call is None:
            return inf
        return min(max(self._repeat_at, self._heard_at + SILENCE_S), self._idle_at)

    def _given_up(self, now: float) -> ZmqEngineError | None:
        if self._heard_at == -inf and now >= self._since + self._config.first_sign_s:
            return WorkerLost("no launcher answers: start one with zmqengine serve")
        ready_s = self._config.ready_timeout_s
        if ready_s is not None and now >= self._since + ready_s:
            return NotReady(
                f"{self._model} is not loaded after {ready_s:.0f} s; wait longer with ready_timeout_s",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return None

    def _choose(self, listed: ModelList, now: float) -> ZmqEngineError | None:
        """Want the only model; the error where there is a choice."""
        try:
            self._model = only_model(listed.models)
        except ZmqEngineError as error:
            self._call = None
            return error
        self._call = next(self._calls)
        self._want(now)
        return None

    def _want(self, now: float) -> None:
        assert self._call is not None
        self._repeat_at = now + min(SILENCE_S, self._config.first_sign_s)
        request = WantModel(self._call, self._model) if self._model else ListModels(self._call)
        self._outbox.actions.append(Send("launcher", encode(request)))

    def _free(self) -> None:
        assert self._call is not None
        self._outbox.actions.append(Send("launcher", encode(FreeModel(next(self._calls), self._call))))
        self._call, self.is_open, self._idle_at = None, False, inf

    def _tell(self, progress: ModelProgress) -> None:
        done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        waits = f", after {', '.join(progress.waits_for)}" if progress.waits_for else ""
        text = f"{progress.model} is {progress.state}: {progress.stage or 'waiting'}{done}{waits}"
        if text != self._told:
            self._told = text
            self._outbox.events.append(ClientEvent("loading", text))
