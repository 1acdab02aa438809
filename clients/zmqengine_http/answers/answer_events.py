"""The vocabulary between a choice and the writer of an API: events, finish, logprobs, usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_http.serving.errors import ApiError


class Text(NamedTuple):
    """A piece of the content or of the reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


class CallStarted(NamedTuple):
    """A tool call begins; `place` is its index within the choice."""

    place: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON arguments of the call at index `place`."""

    place: int
    text: str


class CallEnded(NamedTuple):
    """The arguments of the call at index `place` are complete."""

    place: int


AnswerEvent = Text | CallStarted | CallArguments | CallEnded


class ChoiceLogprobs(NamedTuple):
    """Tokens of a choice and their logprobs, one entry per token."""

    tokens: Sequence[int]
    entries: Sequence[TokenLogprob]


class Start(NamedTuple):
    """Prompt counts of a choice, known before its first event; `cached_tokens` came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int


class Finish(NamedTuple):
    """Why a choice ended: `stop_string` is the stop string found, `stop_token` the matching `stop_token_ids`
    entry."""

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None = None
    stop_token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """vLLM's `stop_reason`: the request's own stop string or stop token id that ended the choice, or
        None."""
        return self.stop_token if self.stop_string is None else self.stop_string


class CompleteCall(NamedTuple):
    """A complete tool call of a choice, its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class WholeChoice:
    """A finished choice, for a response that is not streamed."""

    index: int
    finish: Finish
    content: str
    reasoning: str
    calls: list[CompleteCall]
    logprobs: ChoiceLogprobs | None


@dataclass
class Usage:
    """Token counts and worker times over all choices of a request.

    A prompt counts once, however many choices it has. `completion` counts every generated token, reasoning
    and end tokens included. `drafted` counts draft tokens, `drafted_accepted` those of them that were
    accepted. `kept` are the tokens of prompts that were read in part. The times are those of the slowest choice.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    drafted: int = 0
    drafted_accepted: int = 0
    kept: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    @property
    def kept_document(self) -> dict[str, int]:
        """`kept` as an extension of each API's usage; nothing where every prompt was read whole."""
        return {"kept_tokens": self.kept} if self.kept else {}

    def take_times(self, queue_ms: float, prefill_ms: float, decode_ms: float) -> None:
        """Keep the times of a choice if it is the slowest so far."""
        if queue_ms + prefill_ms + decode_ms > self.queue_ms + self.prefill_ms + self.decode_ms:
            self.queue_ms, self.prefill_ms, self.decode_ms = queue_ms, prefill_ms, decode_ms


class AnswerWriter(Protocol):
    """Encodes the choices of one request for one API: as streamed events, or as one body.

    A writer serves one request, so it may keep state. For each choice `opening` comes first, then its events
    in order, then `closing`; the events of several choices may interleave. After all choices comes `done`, or
    `error` at any point. `keepalive` may come at any time before that, even first. Each method returns the
    bytes to send, empty if the API has no such event. `whole` is called instead of all others. `logprobs` are
    those of the tokens since the choice's last event that took logprobs; None if the request asked for none.
    """

    def opening(self, index: int, start: Start) -> bytes: ...

    def text(self, index: int, text: Text, logprobs: ChoiceLogprobs | None) -> bytes: ...

    def call_started(self, index: int, call: CallStarted, logprobs: ChoiceLogprobs | None) -> bytes: ...

    def call_arguments(self, index: int, piece: CallArguments) -> bytes: ...

    def call_ended(self, index: int, place: int) -> bytes: ...

    def closing(self, index: int, finish: Finish, logprobs: ChoiceLogprobs | None) -> bytes: ...

    def done(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def keepalive(self) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...
