"""A cache of token ids by segment of the prompt: only the newest turn of a conversation is tokenised again.

A tokenizer first splits a text at its special tokens, so the segments between them can be tokenised separately.
Where that does not hold for a tokenizer, a test at the start finds out, and texts are not split.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import tokenizers

TEXT_CHARS_MIN = 4096
"""Shorter texts are not split: they are tokenised in a millisecond or two."""
PART_CHARS_MIN = 256
CHARS_MAX = 16 * 1024 * 1024
_PROBES = ("a b", " lead", "trail ", "\nline\n\n", "x  y", "1 2.3", "\u00e9\u4f60\U0001f600", "\t")

EncodeParts = Callable[[Sequence[str]], list[list[int]]]
"""Token ids of texts, without special tokens around them."""


class SegmentCache:
    """`encode` gives the same ids as the tokenizer would. Safe to use from several threads.

    `encode_parts` tokenises segments that are not cached. The least recently used segments are evicted first.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, encode_parts: EncodeParts, chars_max: int = CHARS_MAX
    ) -> None:
        self._encode_parts = encode_parts
        self._chars_max = chars_max
        self._chars = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._ids = _cutting_tokens(tokenizer)
        self._cut = _pattern(self._ids)
        if self._cut is not None and not self._agrees():
            self._cut = None

    @property
    def usable(self) -> bool:
        """Whether texts may be split for this tokenizer."""
        return self._cut is not None

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        if self._cut is None:
            return self._encode_parts([text])[0]
        # Segments at even indices, special tokens between them.
        parts = self._cut.split(text)
        segments = self._find(parts[::2])
        new = [place for place, ids in enumerate(segments) if ids is None]
        for place, made in zip(new, self._encode_parts([parts[2 * place] for place in new]), strict=True):
            segments[place] = made
            self._keep(parts[2 * place], made)
        tokens: list[int] = []
        for place, ids in enumerate(segments):
            assert ids is not None
            tokens += ids
            if 2 * place + 1 < len(parts):
                tokens.append(self._ids[parts[2 * place + 1]])
        return tokens

    def _find(self, parts: Sequence[str]) -> list[Sequence[int] | None]:
        segments: list[Sequence[int] | None] = []
        with self._lock:
            for part in parts:
                ids = self._known.get(part) if len(part) >= PART_CHARS_MIN else None
                if ids is not None:
                    self._known.move_to_end(part)
                segments.append(ids if part else ())
        return segments

    def _keep(self, part: str, ids: Sequence[int]) -> None:
        if not PART_CHARS_MIN <= len(part) <= self._chars_max:
            return
        with self._lock:
            if part not in self._known:
                self._known[part] = array("I", ids)
                self._chars += len(part)
            while self._chars > self._chars_max:
                self._chars -= len(self._known.popitem(last=False)[0])

    def _agrees(self) -> bool:
        """Whether probe texts give the same ids split and whole."""
        tokens = list(self._ids)[:3]
        texts = [f"{token}".join(_PROBES) for token in tokens]
        texts += [f"{token}{probe}{token}{token}{probe}" for token in tokens for probe in _PROBES]
        return all(
            self.encode(text) == whole for text, whole in zip(texts, self._encode_parts(texts), strict=True)
        )


def _cutting_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Special tokens that are matched before normalisation and strip no white space."""
    return {
        token.content: id_
        for id_, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    }


def _pattern(ids: dict[str, int]) -> re.Pattern[str] | None:
    """A pattern that matches the longest special token at a position, as the tokenizer does."""
    if not ids:
        return None
    return re.compile(f"({'|'.join(re.escape(token) for token in sorted(ids, key=len, reverse=True))})")
