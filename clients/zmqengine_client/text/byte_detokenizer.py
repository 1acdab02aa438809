"""Incremental detokenisation for byte-level vocabularies, such as GPT-2's, where each token is a byte string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


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
