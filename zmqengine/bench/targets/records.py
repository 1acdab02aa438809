"""What is asked of a server, and what was seen of the answer."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from zmqengine.protocol.messages import Constraint


class Arrival(NamedTuple):
    """`tokens` tokens were read together, at `at_s` on the monotonic clock of this machine."""

    at_s: float
    tokens: int


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how long the answer is: greedy, and never ended by an end token where that can be asked.

    `prompt_ids` is empty where no tokenizer is known; a worker needs it, an HTTP server gets the text. A `constraint`
    is what the answer must be; over HTTP it is a schema.
    """

    text: str
    prompt_ids: list[int] = []
    max_tokens: int = 64
    stream: bool = True
    constraint: Constraint | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The arrivals of one answer, and how it ended. `error` is empty unless it ended badly.

    A request that its own reader left is `cancelled`, which is neither completed nor an error.
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
        """Whether the whole answer arrived."""
        return not self.error and not self.cancelled

    @property
    def tokens(self) -> int:
        """How many tokens arrived."""
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def first_token_s(self) -> float | None:
        """When the first token arrived."""
        return next((arrival.at_s for arrival in self.arrivals if arrival.tokens), None)
