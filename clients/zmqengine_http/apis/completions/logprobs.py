"""Log-probabilities as completions have them."""

from __future__ import annotations

import codecs

from zmqengine_http.answers.answer_events import Logprobs
from zmqengine_http.apis.openai_api.logprobs import LOWEST
from zmqengine_http.workers.worker import Model


class TextLogprobs:
    """Shapes the log-probabilities of one choice, piece by piece in order.

    `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; offsets are characters of the choice's text. A token
    that is part of a character is written as `bytes:\\xf0\\x9f`, as OpenAI has it.
    """

    def __init__(self, model: Model, top: int) -> None:
        self._model = model
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def shaped(self, logprobs: Logprobs) -> object:
        """The value of the field for these tokens."""
        offsets = []
        for token in logprobs.tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._model.tokenizer.token_bytes(token)))
        tops = [
            {self._text(id_): max(logprob, LOWEST) for id_, logprob in reversed(entry.top[: self._top])}
            for entry in logprobs.entries
        ]
        return {
            "tokens": [self._text(token) for token in logprobs.tokens],
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in logprobs.entries],
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        text = self._model.token_text(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._model.tokenizer.token_bytes(token))
