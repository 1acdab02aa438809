"""Log-probabilities as completions have them."""

from __future__ import annotations

from collections.abc import Callable

from zmqengine_http.answer_events import Logprobs
from zmqengine_http.openai_api.logprobs import LOWEST


class TextLogprobs:
    """Shapes the log-probabilities of one choice, piece by piece in order.

    `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; offsets are characters of the choice's text.
    """

    def __init__(self, text_of: Callable[[int], str], top: int) -> None:
        self._text_of = text_of
        self._top = top
        self._offset = 0

    def shaped(self, logprobs: Logprobs) -> object:
        """The value of the field for these tokens."""
        texts = [self._text_of(token) for token in logprobs.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        tops = [
            {self._text_of(id_): max(logprob, LOWEST) for id_, logprob in reversed(entry.top[: self._top])}
            for entry in logprobs.entries
        ]
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in logprobs.entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }
