"""Interface between scenarios and servers: a target, a session with it, a stream, its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.sse import CountTokens
from zmqengine.errors import ZmqEngineError

TargetKind = Literal["worker", "http"]


class TargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Address and label of a target. `pids` are its server processes, if known.

    `worker` is the address of the zmqengine worker behind it, if any, whose numbers can be read.
    """

    label: str
    kind: TargetKind
    address: str
    model: str = ""
    api: Literal["completions", "chat"] = "completions"
    pids: list[int] = []
    worker: str = ""


class TargetOutcome(Protocol):
    """An answer that has ended, parsed only after the measurement."""

    def record(self, count_tokens: CountTokens | None = None) -> RequestRecord: ...


class TargetStream(Protocol):
    """A request in flight."""

    @property
    def chunks(self) -> int:
        """The number of received chunks with tokens."""
        ...

    async def wait_chunks(self, chunks: int) -> bool:
        """Wait until this number of chunks with tokens has arrived; False if the stream ended before."""
        ...

    def cancel(self) -> None:
        """Close the connection, or abort. The outcome is then `cancelled`. Idempotent."""
        ...

    async def outcome(self) -> TargetOutcome:
        """Wait for the end. Failures of the server are in the outcome, not raised."""
        ...


class TargetSession(Protocol):
    """One front-end's connection to a target, used from one event loop. `clock` gives the times in its records."""

    clock: Callable[[], float]

    def send(self, request: RequestSpec) -> TargetStream:
        """Start a request now."""
        ...

    async def close(self) -> None:
        """Cancel running streams and close. Idempotent."""
        ...


class TargetError(ZmqEngineError):
    """A target that cannot be measured; the message is one line with advice."""

    code = "target"
