"""The worker behind an adapter: its state, its model and its load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zmqengine.protocol.messages import Limits, ModelCard
from zmqengine_client import AsyncClient, ClientEvent, CurveKeys
from zmqengine_client.errors import ZmqEngineError
from zmqengine_client.pause import Pause
from zmqengine_client.text.tokenizer import Tokenizer

log = logging.getLogger("zmqengine.smg")

PROBE_S = 1.0
PROBE_UNREADY_S = 0.2


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """Card, limits and tokenizer of the model that the worker has loaded."""

    card: ModelCard
    limits: Limits
    tokenizer: Tokenizer


class ModelChanged(ZmqEngineError):
    """The worker serves another model than the one that the gateway registered; restart and register
    again."""


class Upstream:
    """Polls one worker while `run` runs.

    `model` and `numbers` are the latest reports, kept while the worker restarts. The client reconnects and
    resumes streams by itself. `on_change` callbacks are called when `state` changes.

    `run` raises `ModelChanged` if the worker comes back with another model: the gateway would keep sending
    token ids of the model that it registered.
    """

    def __init__(
        self, address: str | None, keys: CurveKeys | None = None, *, patience_s: float = 60.0
    ) -> None:
        self.client = AsyncClient(
            address,
            name="zmqengine smg",
            keys=keys,
            worker_lost_timeout_s=patience_s,
            on_event=self._on_event,
        )
        self.state = "unknown"
        self.state_since = time.monotonic()
        self.model: UpstreamModel | None = None
        self.numbers: Mapping[str, int | float] = {}
        self.on_change: list[Callable[[], None]] = []
        self._pause = Pause()

    @property
    def ready(self) -> bool:
        """Whether the worker takes new requests."""
        return self.state == "ready"

    async def run(self) -> None:
        """Poll the worker's state and numbers. Closes the client when cancelled."""
        try:
            while True:
                await self._probe()
                await self._pause.last(PROBE_S if self.ready else PROBE_UNREADY_S)
        finally:
            await self.client.close()

    async def wait_for(self, wanted: Callable[[], bool]) -> None:
        """Wait until `wanted()` is true; it is evaluated again after each change of state."""
        changed = asyncio.Event()
        self.on_change.append(changed.set)
        try:
            while not wanted():
                changed.clear()
                await changed.wait()
        finally:
            self.on_change.remove(changed.set)

    async def _probe(self) -> None:
        try:
            description = await self.client.describe()
            if (
                description.state == "ready"
                and description.model is not None
                and description.limits is not None
            ):
                await self._learn(description.model, description.limits)
                self.numbers = (await self.client.status()).numbers
            self._enter(description.state)
        except ModelChanged:
            raise
        except ZmqEngineError as error:
            self._enter("unreachable", error.message)

    async def _learn(self, card: ModelCard, limits: Limits) -> None:
        known = self.model
        if known is not None and (card.name, card.tokenizer_hash) != (
            known.card.name,
            known.card.tokenizer_hash,
        ):
            raise ModelChanged(
                f"the worker now serves {card.name!r} but the gateway knows {known.card.name!r}: restart this process "
                "and register it with the gateway again"
            )
        if known is None or known.card != card or known.limits != limits:
            self.model = UpstreamModel(card, limits, await self.client.tokenizer())

    def _on_event(self, event: ClientEvent) -> None:
        if event.kind in ("lost", "fatal", "fenced"):
            self._enter("unreachable", event.message)
        self._pause.end()

    def _enter(self, state: str, reason: str = "") -> None:
        if state == self.state:
            return
        self.state, self.state_since = state, time.monotonic()
        level = logging.INFO if state in ("ready", "loading", "warming") else logging.WARNING
        log.log(level, "the worker is %s%s", state, f": {reason}" if reason else "")
        for listener in list(self.on_change):
            listener()
