"""The bytes of one token, which its text alone does not show if it is part of a character."""

from __future__ import annotations

import re

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level vocabularies: printable bytes as themselves, the others in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
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
