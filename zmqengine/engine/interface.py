"""What the actor knows of an engine.

An engine holds the rows of one batch and makes one token for each of them a step. The MLX engine and the fake
engine both follow this page. Every method is called from one thread, the one that built the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

EngineFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The order is: logit_bias, penalties, temperature, top_k, top_p, min_p.

    The neutral value of a field turns it off: temperature 0 is greedy, top_p 1, top_k 0, min_p 0,
    repetition_penalty 1, presence_penalty 0 and frequency_penalty 0.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row to generate. All ids were checked against the vocabulary, all numbers against their bounds.

    `prompt` and `emitted` together are what the model reads first. `emitted` holds output tokens of an earlier
    life of this request (before a crash or an engine reset): the next token has output index `len(emitted)`,
    penalties count them as output, and the sampling key of the token at output index i is that of (seed, i).
    `max_tokens` counts the whole output, `emitted` included, and is more than `len(emitted)`.
    `stop_token_ids` already holds the model's end tokens unless the request ignores them. The stop token is the
    last token of the output. `logprobs` is None for none, or how many top alternatives go with each token.
    """

    row: int
    prompt: Sequence[int]
    max_tokens: int
    emitted: Sequence[int] = ()
    sampling: Sampling = Sampling()
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities after bias and penalties, before temperature; `top` is sorted, best first."""

    logprob: float
    top: list[tuple[int, float]]


class RowToken(NamedTuple):
    """One new output token of one row. A row with `finish` has left the batch."""

    row: int
    token: int
    logprobs: TokenLogprobs | None
    finish: EngineFinish | None


class RowPrefill(NamedTuple):
    """How far the prompt of one row has come: `done` of `total` tokens, `cached` of them from the prompt cache."""

    row: int
    done: int
    total: int
    cached: int


class RowFailure(NamedTuple):
    """A row that raised. It has left the batch; the others go on."""

    row: int
    message: str


@dataclass(slots=True)
class StepResult:
    """What one `next()` did."""

    tokens: list[RowToken] = field(default_factory=list)
    prefills: list[RowPrefill] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model that requests are checked against. `context_tokens` bounds prompt + output."""

    name: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was built, and bytes now. A byte count the platform cannot tell is 0."""

    rows_decoding: int
    rows_prefilling: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    kv_bytes: int
    prompt_cache_bytes: int
    prompt_cache_entries: int
    active_bytes: int
    cache_bytes: int
    peak_bytes: int


class Engine(Protocol):
    """One model and its batch."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        ...

    @property
    def rows_max(self) -> int:
        """How many rows the engine takes at once, in prefill and decode together."""
        ...

    def insert(self, requests: Sequence[RowRequest]) -> list[RowFailure]:
        """Add rows; their prefill starts in the next `next()`. Returns those that could not be added."""
        ...

    def next(self) -> StepResult:
        """Make one decode step for the rows that decode, then at most one bounded chunk of prefill.

        An exception means that the batch is lost: the caller resets the engine.
        """
        ...

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows in any phase. Unknown and repeated ids are no error; one bad row never keeps another."""
        ...

    def reset(self) -> None:
        """Drop every row and all state of the batch. The model stays loaded; the prompt cache is emptied."""
        ...

    def project_bytes(self, prompt_tokens: int, max_tokens: int) -> int:
        """Bytes of KV cache that a request of this size holds at its end, from the model's real cache shapes."""
        ...

    def trim_prompt_cache(self, bytes_max: int) -> int:
        """Evict least recently used prompts until the prompt cache is within `bytes_max`; returns bytes freed.

        Buffers that the platform keeps for reuse are given back as well.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters and bytes."""
        ...

    def close(self) -> None:
        """Free the batch and restore what the engine changed in the process (the wired limit). Idempotent."""
        ...
