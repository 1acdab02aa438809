"""Events of an OpenAI-compatible stream: bytes with times in, arrivals and totals out. No I/O, no clock.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html and OpenAI's streaming objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from zmqengine.bench.targets.records import Arrival, RequestRecord

CountTokens = Callable[[str], int]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    def new_text(self) -> str:
        part = self.delta or self.message
        if part is None:
            return self.text or ""
        return (part.reasoning_content or part.reasoning or "") + (part.content or "")


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamedAnswer:
    """One answer, accumulated from its events."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, str]] = []
        self.usage: _Usage | None = None
        self.finish = ""
        self.error = ""
        self.done = False

    def add(self, at_s: float, data: bytes) -> None:
        """Add one event, or the body of a non-streamed answer."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _DECODER.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.error = self.error or f"not an event: {error}"
            return
        if event.error is not None:
            self.error = msgspec.json.encode(event.error).decode()[:200]
        self.usage = event.usage or self.usage
        for choice in event.choices:
            text = choice.new_text()
            if text:
                self.chunks.append((at_s, text))
            self.finish = choice.finish_reason or self.finish

    def record(
        self,
        started_s: float,
        ended_s: float,
        *,
        error: str,
        cancelled: bool,
        count_tokens: CountTokens | None,
    ) -> RequestRecord:
        """The record of this answer; tokens of its chunks follow from the usage that the server reports."""
        texts = [text for _, text in self.chunks]
        total = self.usage.completion_tokens if self.usage else None
        counts = tokens_of_chunks(texts, total, count_tokens)
        details = self.usage.prompt_tokens_details if self.usage else None
        complete = bool(self.finish or self.done)
        return RequestRecord(
            started_s=started_s,
            ended_s=ended_s,
            arrivals=[Arrival(at_s, n) for (at_s, _), n in zip(self.chunks, counts, strict=True)],
            prompt_tokens=self.usage.prompt_tokens if self.usage else 0,
            cached_tokens=details.cached_tokens if details else None,
            finish=self.finish,
            error=error or self.error or ("" if complete or cancelled else "the answer has no end"),
            cancelled=cancelled,
            text="".join(texts),
        )


def answer_of_stream(body: Iterable[tuple[float, bytes]]) -> StreamedAnswer:
    """The answer in a body of server-sent events, read in pieces. An event arrives with its last byte."""
    answer = StreamedAnswer()
    rest = b""
    for at_s, data in body:
        rest = (rest + data).replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for event in events:
            lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
            payload = b"\n".join(line[5:].removeprefix(b" ") for line in lines)
            if payload:
                answer.add(at_s, payload)
    return answer


def answer_of_body(body: Sequence[tuple[float, bytes]]) -> StreamedAnswer:
    """The answer in a non-streamed body: all tokens arrive with its last byte."""
    answer = StreamedAnswer()
    if body:
        answer.add(body[-1][0], b"".join(data for _, data in body))
    return answer


def tokens_of_chunks(texts: Sequence[str], total: int | None, count_tokens: CountTokens | None) -> list[int]:
    """The number of tokens in each chunk of text; their sum is `total` if that is known.

    One per chunk if that matches the total or there is no total. Otherwise each text is counted, by `count_tokens` or
    by its length, and the error of counting pieces is spread by the same weights.
    """
    if total is None:
        return [1] * len(texts)
    if total == len(texts) or not texts:
        return [1] * len(texts)
    weights = [max(1, count_tokens(text) if count_tokens else len(text)) for text in texts]
    if sum(weights) == total:
        return weights
    return _apportion(weights, total)


def _apportion(weights: Sequence[int], total: int) -> list[int]:
    """Integers in proportion to the weights with the sum `total`, by rounding the running sum."""
    whole = sum(weights)
    bounds, running = [0], 0
    for weight in weights:
        running += weight
        bounds.append((running * total + whole // 2) // whole)
    bounds[-1] = total
    return [later - earlier for earlier, later in pairwise(bounds)]
