"""The seam between scenarios and what they measure: a target, a session with it, a stream in flight."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.sse import CountTokens
from zmqengine.errors import ZmqEngineError

TargetKind = Literal["worker", "http"]


class TargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where a target is and what to call it. `pids` are its server processes, where they are known.

    `worker` is the address of the worker behind it, if there is one of ours: its passes can be read.
    """

    label: str
    kind: TargetKind
    address: str
    model: str = ""
    api: Literal["completions", "chat"] = "completions"
    pids: list[int] = []
    worker: str = ""
    extra_body: dict[str, object] = {}


class TargetOutcome(Protocol):
    """An answer that has ended. Reading it apart is left for when nobody is being timed."""

    def record(self, count_tokens: CountTokens | None = None) -> RequestRecord:
        """What was seen of it."""
        ...


class TargetStream(Protocol):
    """A request in flight."""

    @property
    def chunks(self) -> int:
        """How many chunks with tokens have arrived."""
        ...

    async def wait_chunks(self, chunks: int) -> bool:
        """Wait until so many chunks with tokens have arrived; False if it ended before."""
        ...

    def cancel(self) -> None:
        """Leave: close the connection, or abort. The outcome then says `cancelled`. Idempotent."""
        ...

    async def outcome(self) -> TargetOutcome:
        """Wait for the end. Never raises for what the server did."""
        ...


class TargetSession(Protocol):
    """One front-end's connection to a target, used from one event loop."""

    def send(self, request: RequestSpec) -> TargetStream:
        """Start a request now."""
        ...

    async def close(self) -> None:
        """Leave whatever still runs and close. Idempotent."""
        ...


class TargetError(ZmqEngineError):
    """A target that cannot be measured; the message is one line and says what to do."""

    code = "target"
