"""The prompt cache of the fake engine: it remembers tokens, and counts bytes as if their caches were kept."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple, TypeAlias

Tokens: TypeAlias = "array[int]"


class _Parked(NamedTuple):
    """A row that may come back: all its tokens, and how many of them have caches."""

    scope: str
    tokens: Tokens
    held: int


class _Kept(NamedTuple):
    """A prompt that a row of one scope has read, for all rows of that scope."""

    scope: str
    tokens: Tokens
    is_pinned: bool


class FakePromptCache:
    """Token sequences within `bytes_max`, at `token_bytes` each token; the least recently used go first, pinned ones
    after all others, then parked rows."""

    def __init__(self, bytes_max: int, token_bytes: int) -> None:
        self._bytes_max = bytes_max
        self._token_bytes = token_bytes
        self._prompts: OrderedDict[tuple[str, bytes], _Kept] = OrderedDict()
        self._parked: OrderedDict[int, _Parked] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def prompt_bytes(self) -> int:
        """Bytes of prompts, parked rows apart."""
        return sum(len(kept.tokens) for kept in self._prompts.values()) * self._token_bytes

    @property
    def parked_bytes(self) -> int:
        return sum(parked.held for parked in self._parked.values()) * self._token_bytes

    def store(self, tokens: Tokens, scope: str = "", *, is_pinned: bool = False) -> None:
        """Keep what a row held, if it fits beside the parked rows and nothing kept covers it."""
        room = self._bytes_max - self.parked_bytes
        if not len(tokens) or len(tokens) * self._token_bytes > room:
            return
        alike = {key: kept for key, kept in self._prompts.items() if kept.scope == scope}
        if any(kept.tokens[: len(tokens)] == tokens for kept in alike.values()) and not is_pinned:
            return
        for key, kept in alike.items():
            if tokens[: len(kept.tokens)] == kept.tokens and (is_pinned or not kept.is_pinned):
                del self._prompts[key]
        self._prompts[scope, tokens.tobytes()] = _Kept(scope, tokens, is_pinned)
        self._evict()

    def park(self, row: int, tokens: Tokens, held: int, scope: str = "") -> int:
        """Keep the first `held` of a row's `tokens` for when it comes back; returns how many are kept."""
        if not held or held * self._token_bytes > self._bytes_max:
            return 0
        self._parked[row] = _Parked(scope, tokens, held)
        self._evict()
        return held

    def forget(self, row: int) -> None:
        """This parked row will not come back: treat it as any other prompt."""
        parked = self._parked.pop(row, None)
        if parked is not None:
            self.store(parked.tokens[: parked.held], parked.scope)

    def take(self, tokens: Tokens, scope: str = "") -> int:
        """How many of `tokens` need not be read, at most all but the last. A parked row is parked no longer."""
        for row, parked in self._parked.items():
            if parked.tokens == tokens and parked.scope == scope:
                del self._parked[row]
                return parked.held
        best = 0
        for key, kept in list(self._prompts.items()):
            whole = len(kept.tokens)
            if kept.scope == scope and tokens[:whole] == kept.tokens and whole > best:
                best = whole
                self._prompts.move_to_end(key)
        return min(best, len(tokens) - 1)

    def limit(self, bytes_max: int) -> int:
        """Keep at most `bytes_max` from now on; returns the bytes dropped."""
        before = self.prompt_bytes + self.parked_bytes
        self._bytes_max = bytes_max
        self._evict()
        return before - self.prompt_bytes - self.parked_bytes

    def _evict(self) -> None:
        while self._prompts and self.prompt_bytes + self.parked_bytes > self._bytes_max:
            loose = (key for key, kept in self._prompts.items() if not kept.is_pinned)
            del self._prompts[next(loose, next(iter(self._prompts)))]
        while self._parked and self.parked_bytes > self._bytes_max:
            self._parked.popitem(last=False)

    def clear(self, *, keep_prompts: bool = False) -> None:
        """Drop parked rows, and prompts unless they are kept."""
        if not keep_prompts:
            self._prompts.clear()
        self._parked.clear()
