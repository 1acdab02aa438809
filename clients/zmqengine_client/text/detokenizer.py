"""Incremental detokenisation.

Why not `tokenizers.DecodeStream`: it cannot flush at the end of an output, so a text that is cut inside a character
ends too early, and on runs of byte tokens that are not UTF-8 it raises. It takes 0.6 us a token where this takes 2.1
(tokenizers 0.23, pico's tokenizer); one step of a model takes thousands.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
HELD_TOKENS_MAX = 32
"""Tokens held back, at most: past it, all text but an incomplete last character is output."""
BEGINNING_TOKENS_MAX = 3
"""Tokens of an incomplete character, at most."""
_new_decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


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


class ByteDetokenizer:
    """A `Detokenizer` in a quarter of the time: no token's text depends on its neighbours, so none is decoded twice.

    `bytes_of` gives the bytes of a token, empty for an id without text. Invalid UTF-8 becomes U+FFFD, once for each
    maximal prefix of a character, as Unicode recommends.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = _new_decoder("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final after these ids: an incomplete character is held back."""
        return self._decode(b"".join(map(self._bytes_of, ids)))

    def finish(self) -> str:
        """The text that was held back, with U+FFFD for an incomplete character."""
        return self._decode(b"", True)


def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level vocabularies: printable bytes as themselves, the others in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def piece_bytes(piece: str, *, by_byte: bool) -> bytes:
    """The bytes of a vocabulary entry. `by_byte`: each of its characters is a byte.

    Otherwise U+2581 is a space and `<0x0A>` is a byte, as in SentencePiece.
    """
    if by_byte:
        if all(character in _ALPHABET for character in piece):
            return bytes(_ALPHABET[character] for character in piece)
        return piece.encode()
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
