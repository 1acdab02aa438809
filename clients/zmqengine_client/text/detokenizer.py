"""Incremental detokenisation.

Why not `tokenizers.DecodeStream`: it cannot flush at the end of an output, so a text that is cut inside a character
ends too early, and on runs of byte tokens that are not UTF-8 it raises. It takes 0.6 us a token where this takes 2.1
(tokenizers 0.23, pico's tokenizer); one step of a model takes thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
HELD_TOKENS_MAX = 32
"""A character has at most 4 bytes: of more tokens all is told but the beginning of one at their end."""
BEGINNING_TOKENS_MAX = 3
"""Of a character that is not whole."""


class Detokenizer:
    """Decodes ids as they arrive; the pieces joined equal the text of all ids decoded at once.

    An incomplete character is held back. Each push decodes a window of a few tokens, so the cost of a stream is linear
    in its length. `decode` turns ids into text, `skip` are ids without text.

    Decoders drop a space at the start of a text and join pieces depending on the previous one, so new tokens are
    always decoded after some tokens that were already output, whose text is then cut off.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int] = ()) -> None:
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._told = 0
        self._told_text = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final after these ids."""
        skip = self._skip
        self._window.extend([id_ for id_ in ids if id_ not in skip] if skip else ids)
        if len(self._window) == self._told:
            return ""
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._tell(text)
        if len(self._window) - self._told <= HELD_TOKENS_MAX:
            return ""
        held = self._beginning(text)
        return self._tell(self._decode(self._window[:-held]) if held else text, held)

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for an incomplete character."""
        return self._tell(self._decode(self._window)) if len(self._window) > self._told else ""

    def _beginning(self, text: str) -> int:
        """Tokens at the end of the window, which decodes to `text`, that may be an incomplete character."""
        cuts = []
        for held in range(BEGINNING_TOKENS_MAX, 0, -1):
            rest = self._decode(self._window[-held:])
            if not rest.strip(REPLACEMENT):
                cuts.append((held, self._decode(self._window[:-held]), rest))
        # Bytes of one character decode to fewer replacements together than apart: no cut there.
        whole = [held for held, head, _ in cuts if not head.endswith(REPLACEMENT)]
        whole += [held for held, head, rest in cuts if head + rest == text]
        return whole[0] if whole else 0

    def _tell(self, text: str, held: int = 0) -> str:
        end = len(self._window) - held
        if text.startswith(self._told_text):
            piece = text[len(self._told_text) :]
        else:
            # The decoder changed text that was already output (an invalid byte right after a character made of
            # byte tokens): that cannot be taken back.
            piece = self._decode(self._window[self._told : end])
        self._window = self._window[self._told :]
        self._told = end - self._told
        self._told_text = self._decode(self._window[: self._told])
        return piece
