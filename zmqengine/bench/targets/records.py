"""Requests to a server, and records of its answers."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from zmqengine.protocol.messages import Constraint


class Arrival(NamedTuple):
    """A number of tokens read together, at `at_s` on this machine's monotonic clock."""

    at_s: float
    tokens: int


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the length of its answer and its sampling; end tokens are ignored where the server can.

    `prompt_ids` is empty without a known tokenizer; a worker needs it, an HTTP server gets the text. A `constraint`
    over HTTP is a schema.
    """

    text: str
    prompt_ids: list[int] = []
    max_tokens: int = 64
    stream: bool = True
    constraint: Constraint | None = None
    temperature: float = 0.0
    top_p: float = 1.0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals of one answer, and its end. `error` is empty unless it failed.

    A request that its client cancelled is `cancelled`, which is neither completed nor an error.
    """

    started_s: float
    ended_s: float
    arrivals: list[Arrival] = []
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""
    cancelled: bool = False
    text: str = ""
    output_ids: list[int] = []

    @property
    def completed(self) -> bool:
        """Whether the answer is complete."""
        return not self.error and not self.cancelled

    @property
    def tokens(self) -> int:
        """The number of tokens received."""
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first_token_s(self) -> float | None:
        """The arrival time of the first token."""
        return next((arrival.at_s for arrival in self.arrivals if arrival.tokens), None)
