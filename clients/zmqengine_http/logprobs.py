"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zmqengine.protocol.messages import TokenLogprob

TokenText = Callable[[int], str]
LOWEST = -9999.0
"""Stands for minus infinity, as in OpenAI's API."""


class LogprobShape(Protocol):
    """Makes the `logprobs` of a piece of one choice; pieces come in order."""

    def shaped(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> object:
        """The value of the field for these tokens."""


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`."""

    def __init__(self, text_of: TokenText, top: int) -> None:
        self._text_of = text_of
        self._top = top

    def shaped(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> object:
        entries = [
            {
                **self._entry(token, entry.logprob),
                "top_logprobs": [self._entry(id_, logprob) for id_, logprob in entry.top[: self._top]],
            }
            for token, entry in zip(tokens, logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        text = self._text_of(token)
        # Part of a character: its bytes are not known from its text.
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": raw}


class TextLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; offsets are characters of the choice's text."""

    def __init__(self, text_of: TokenText, top: int) -> None:
        self._text_of = text_of
        self._top = top
        self._offset = 0

    def shaped(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> object:
        texts = [self._text_of(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            {self._text_of(id_): max(logprob, LOWEST) for id_, logprob in reversed(entry.top[: self._top])}
            for entry in logprobs
        ]
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in logprobs],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }
