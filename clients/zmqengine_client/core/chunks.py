"""Results of a stream: chunks while it runs, a completion at its end."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from zmqengine.protocol.messages import TokenLogprob


class TokenChunk(Struct, frozen=True):
    """New tokens, in order and without a gap: `tokens[0]` is output token number `first_index`.

    A slow reader gets fewer, longer chunks. `logprobs` has one entry a token if they were asked for.
    """

    first_index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class TextChunk(Struct, frozen=True):
    """New text. `str(chunk)` is the text.

    `tokens` are those received since the chunk before. Text that may still turn into another character or a stop
    string is held back, so the text of a token can come one chunk later than the token. `reasoning` is new text of the
    reasoning before an answer, which `chat` keeps apart.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    first_index: int = 0
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


class ToolCall(Struct, frozen=True):
    """A call of an offered function that the model wrote, whole. `id` is drawn here: most models write none."""

    id: str
    name: str
    arguments: dict[str, Any]


class PromptProgress(Struct, frozen=True):
    """Progress of prefill: `done` of `total` prompt tokens, `cached` of them from the worker's prefix cache."""

    done: int
    total: int
    cached: int


class Completion(Struct, frozen=True):
    """The outcome of a request.

    `finish` is a word of the protocol (`stop`, `length`, `abort` and the failures). `tokens` is the whole output, the
    end token included. `text` and `stop_string` are set by text streams; `reasoning` and `tool_calls` by `chat`, which
    also finishes with `length` if a call was cut or malformed: `tool_calls` has whole ones alone. `resumed` counts the
    worker deaths that the stream has survived. `message` says more about a failure. The worker's times are: in the
    queue, from there to the first token, and from there to the end; for a resumed stream, since the resume. So are
    `drafts`: draft tokens proposed and accepted, by their source. With `prefill_keep` the model has read `kept_tokens`
    of the prompt.
    """

    finish: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    seed: int
    request_id: str
    resumed: int = 0
    message: str = ""
    text: str = ""
    stop_string: str | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    drafts: dict[str, tuple[int, int]] = {}
    kept_tokens: int = 0
    reasoning: str = ""
    tool_calls: list[ToolCall] = []

    @property
    def turn(self) -> dict[str, Any]:
        """The answer as a message, for the next `chat`: results of its calls follow as messages of the role `tool`."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return turn
