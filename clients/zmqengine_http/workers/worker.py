"""One worker of the pool: its client, its state, its model, and the requests that this front-end runs
there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from zmqengine.protocol.messages import Description, Limits, ModelCard
from zmqengine_client import AsyncClient, ClientEvent
from zmqengine_client.errors import BadRequest, ZmqEngineError
from zmqengine_client.pause import Pause
from zmqengine_client.text.answer_text import markers_of
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_client.text.tool_calls import Markers
from zmqengine_http.serving import logs


class SamplingDefaults(NamedTuple):
    """The model's recommended sampling parameters; OpenAI's defaults where it recommends none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sampling_defaults(facts: Mapping[str, object]) -> SamplingDefaults:
    """The defaults in the facts of a tokenizer bundle, where they are numbers as text."""
    defaults: dict[str, float] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        with contextlib.suppress(KeyError, ValueError):
            defaults[name] = kind(str(facts[f"default_{name}"]))
    return SamplingDefaults(**defaults)  # type: ignore[arg-type]


ADAPTER_MARK = ":"
"""Stands between a model and an adapter in the name of both."""


class Model:
    """A loaded model: card, limits, tokenizer, and the markers of its output format."""

    def __init__(self, card: ModelCard, limits: Limits, tokenizer: Tokenizer) -> None:
        self.card = card
        self.limits = limits
        self.tokenizer = tokenizer
        self.markers: Markers = markers_of(tokenizer)
        self.sampling_defaults = sampling_defaults(tokenizer.facts)
        self._texts: dict[int, str] = {}
        self.adapter = ""
        """The adapter with which requests are computed; empty for none."""

    def adapted(self, adapter: str) -> Model:
        """A copy of the model that stands for it with an adapter of its card."""
        model = copy(self)
        model.adapter = adapter
        return model

    @property
    def name(self) -> str:
        """The name by which clients know it."""
        return f"{self.card.name}{ADAPTER_MARK}{self.adapter}" if self.adapter else self.card.name

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and output together at most: the model's, or fewer by the worker's `--context-max`."""
        return self.limits.context_tokens_max

    def warm_up(self) -> None:
        """Fill the caches that make a first request slow, such as the compiled chat template."""
        self.tokenizer.encode("Hello")
        _ = self.tokenizer.longest_token_bytes
        with contextlib.suppress(BadRequest):
            self.tokenizer.encode_chat([{"role": "user", "content": "Hello"}])

    def token_text(self, token: int) -> str:
        """The text of a single token; special tokens are written out."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def same_prompts(self, other: Model) -> bool:
        """Whether prompts tokenized for `other` are valid for this model."""
        return (self.card.name, self.card.tokenizer_hash) == (other.card.name, other.card.tokenizer_hash)


Connect = Callable[[str, Callable[[ClientEvent], None]], AsyncClient]
"""Makes the client for an address; the second argument receives the connection's events."""


class PooledWorker:
    """Polls one worker while `run` runs.

    `ready`: whether it takes new requests. `model`: the last model it served, kept while it restarts.
    `running`: this front-end's requests there, counted by the code that starts and ends them.
    """

    def __init__(self, address: str, connect: Connect, probe_ms: int) -> None:
        self.address = address
        self.ready = False
        self.model: Model | None = None
        self.running = 0
        self._connect = connect
        self._probe_s = probe_ms / 1000
        self._client: AsyncClient | None = None
        self._state = "unknown"
        self._pause = Pause()
        self._became_ready = asyncio.Event()

    @property
    def connected(self) -> AsyncClient | None:
        """The client, or None before the first probe."""
        return self._client

    @property
    def client(self) -> AsyncClient:
        """The client; it exists once a model is known."""
        assert self._client is not None
        return self._client

    @property
    def adapters(self) -> Sequence[str]:
        """Adapters of its model that a request may have."""
        return () if self.model is None else self.model.card.adapters

    def serves(self, model: Model) -> bool:
        """Whether it takes requests for a model, with the adapter that this stands for."""
        if not self.ready or self.model is None or not self.model.same_prompts(model):
            return False
        return not model.adapter or model.adapter in self.adapters

    async def look(self) -> None:
        """Learn its state now."""
        await self._probe()

    async def wait_ready(self, wait_s: float) -> None:
        """Wait until it takes requests, `wait_s` at most, probing at once."""
        self._pause.end()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._became_ready.wait(), wait_s)

    def fail(self, error: ZmqEngineError) -> None:
        """End its requests with this error: it is known not to come back."""
        self._now("unreachable", reason=error.message)
        if self._client is not None:
            self._client.fail(error)

    async def run(self) -> None:
        """Connect and poll the state. The client itself reconnects and resumes streams."""
        try:
            while True:
                await self._probe()
                await self._pause.last(self._probe_s)
        finally:
            if self._client is not None:
                await self._client.close()

    async def _probe(self) -> None:
        try:
            if self._client is None:
                self._client = self._connect(self.address, self._on_event)
            description = await self._client.describe()
            if description.state == "ready":
                await self._learn(description)
            self._now(description.state)
        except ZmqEngineError as error:
            self._now("unreachable", reason=error.message)
        except Exception as error:  # noqa: BLE001 - a failure with one worker must not stop the others
            logs.logger.error(
                "cannot follow a worker", exc_info=error, extra={"fields": {"address": self.address}}
            )
            self._now("failed")

    def _on_event(self, event: ClientEvent) -> None:
        if event.kind in ("lost", "fatal", "fenced"):
            self._now("unreachable", reason=event.message)
        elif event.kind == "resumed":
            logs.info("stream resumed", completion=event.request_id, address=self.address)
        self._pause.end()

    async def _learn(self, description: Description) -> None:
        card, limits = description.model, description.limits
        if card is None or limits is None:
            return
        if self.model is None or self.model.card != card:
            model = Model(card, limits, await self.client.tokenizer())
            if self.model is not None and self.model.same_prompts(model):
                # Adapters have come or gone.
                self.model = model
                return
            await asyncio.to_thread(model.warm_up)
            self.model = model

    def _now(self, state: str, **facts: object) -> None:
        self.ready = state == "ready" and self.model is not None
        if self.ready:
            self._became_ready.set()
        else:
            self._became_ready.clear()
        if state != self._state:
            level = logging.INFO if state in ("ready", "loading", "warming") else logging.WARNING
            model = self.model.card.name if self.model else None
            logs.log(level, "worker", address=self.address, state=state, model=model, **facts)
        self._state = state
