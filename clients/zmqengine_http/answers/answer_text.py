"""Tokens to text for one choice, up to its end token or its first stop string.

Unlike the client library's text stream it can leave special tokens in the text: many models mark reasoning and tool
calls with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine_client.text.stop_strings import StopStrings
from zmqengine_client.text.tokenizer import Tokenizer


class AnswerText:
    """`push` tokens as they come, then `finish`. After `stopped` nothing more belongs to the text.

    `end_token_ids` end the output and have no text. `show_special`: special tokens are text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], end_token_ids: frozenset[int], *, show_special: bool
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=not show_special)
        self._stops = StopStrings(stops)
        self.has_stops = bool(stops)
        self._end_token_ids = end_token_ids
        self.stop_token_ids = end_token_ids - tokenizer.eos_token_ids

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.match

    def visible(self, tokens: list[int]) -> list[int]:
        """Those of the tokens that have a part in the text."""
        return tokens[:-1] if tokens and tokens[-1] in self._end_token_ids else tokens

    def push(self, tokens: list[int]) -> str:
        """The text that is certain after these tokens."""
        return self._stops.push(self._detokenizer.push(self.visible(tokens)))

    def finish(self) -> str:
        """The text that was held back to the end."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
