"""Reasoning as it travels in `encrypted_content`: the one field of it that every client sends back.

Nothing is secret in it, and nothing is kept here: it is the text itself, packed.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "zmqr1."
_CHARS_MAX = 1024 * 1024


def pack(reasoning: str) -> str:
    """The text as one word of ASCII."""
    return _MARK + base64.urlsafe_b64encode(zlib.compress(reasoning.encode("utf-8", "replace"), 1)).decode()


def unpack(packed: str) -> str | None:
    """The text, or None for what was not made by `pack`."""
    if not packed.startswith(_MARK):
        return None
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(packed[len(_MARK) :], b"-_", validate=True), _CHARS_MAX)
    except (binascii.Error, zlib.error, ValueError):
        return None
    return data.decode("utf-8", "ignore")
