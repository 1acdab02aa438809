"""What an answer is made of, whatever API it is told in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from zmqengine.protocol.messages import TokenLogprob
from zmqengine_http.answers.usage import Usage
from zmqengine_http.serving.errors import ApiError


class Text(NamedTuple):
    """A piece of the content or of the reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


class CallStarted(NamedTuple):
    """A tool call begins; `place` counts the calls of one choice."""

    place: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the JSON arguments of the call at `place`."""

    place: int
    text: str


class CallEnded(NamedTuple):
    """The arguments of the call at `place` are complete."""

    place: int


AnswerEvent = Text | CallStarted | CallArguments | CallEnded


class Logprobs(NamedTuple):
    """Tokens and what the model thought of them, one entry a token."""

    tokens: Sequence[int]
    entries: Sequence[TokenLogprob]


class Start(NamedTuple):
    """What is known of a choice before its first event; `cached_tokens` are those of the prompt that were cached."""

    prompt_tokens: int
    cached_tokens: int


class Finish(NamedTuple):
    """Why a choice ended: `stop_string` is the one that was found, `stop_token` the one of `stop_token_ids`."""

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None = None
    stop_token: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """What of the request's own stops ended it, as vLLM tells it: the string, the token id, or null."""
        return self.stop_token if self.stop_string is None else self.stop_string


class ToolCall(NamedTuple):
    """A whole call of an answer, with its arguments as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class WholeChoice:
    """One finished choice."""

    index: int
    finish: Finish
    content: str
    reasoning: str
    calls: list[ToolCall]
    logprobs: Logprobs | None


class AnswerWriter(Protocol):
    """Writes one answer in the words of an API: events that are streamed, or one body.

    Made for one request, so it may keep what it has told. For each choice `opening` comes first, then its events in
    order, then `closing`; choices alternate as they please. After all of them comes `done`, or `error` wherever it
    stopped. `keepalive` may come at any time before that, also before anything else. Each returns the bytes to send,
    none where the API has nothing to say. `whole` is called instead of all of these. Logprobs are those of the tokens
    that came since the last event of the choice that took any; None if none were asked for.
    """

    def opening(self, index: int, start: Start) -> bytes: ...

    def text(self, index: int, text: Text, logprobs: Logprobs | None) -> bytes: ...

    def call_started(self, index: int, call: CallStarted, logprobs: Logprobs | None) -> bytes: ...

    def call_arguments(self, index: int, piece: CallArguments) -> bytes: ...

    def call_ended(self, index: int, place: int) -> bytes: ...

    def closing(self, index: int, finish: Finish, logprobs: Logprobs | None) -> bytes: ...

    def done(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def keepalive(self) -> bytes: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...
