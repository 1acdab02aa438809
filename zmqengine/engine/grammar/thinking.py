"""Bounds the reasoning of a row: at its bound, only the tokens that end it are allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zmqengine.engine.grammar.matcher import FORCED_MAX, RowMatcher

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLTokenizer

_BITS = 32
Phase = Literal["before", "inside", "outside", "over"]
"""Phase of a row's reasoning.

before: it may begin, as nothing but white space has come. inside: behind an opener. outside: the opener may come, at
any place. over: it cannot begin again.
"""
Spell = Callable[[list[int]], bytes]


@dataclass(frozen=True, slots=True)
class Marker:
    """The opener or closer of reasoning. With a `text` it is recognised in whatever tokens spell it."""

    ids: tuple[int, ...]
    text: bytes = b""

    def ends(self, ids: tuple[int, ...], text: bytes) -> bool:
        """Whether an output whose last tokens are `ids`, and whose last bytes hold `text`, has come to its end."""
        return self.text in text if self.text else bool(self.ids) and ids[-len(self.ids) :] == self.ids


@dataclass(frozen=True, slots=True)
class ThinkingBound:
    """At most `tokens` tokens of reasoning, for one request; the fields are those of `thinking_max` in SPEC.md.

    `spell` gives the bytes of tokens; None where the tokenizer of the model is not known.
    """

    tokens: int
    opener: Marker
    closer: Marker
    then: tuple[int, ...] = ()
    opened: bool = False
    repeats: bool = False
    spell: Spell | None = None

    def start(self, output: Sequence[int], grammar: RowMatcher | None = None) -> ThinkingMatcher:
        """The matcher of a row with this `output` so far, and with the matcher of its `grammar`."""
        matcher = ThinkingMatcher(self, grammar)
        for token in output:
            matcher.follow(token)
        return matcher


def thinking_bound(
    tokens: int,
    closer: Sequence[int],
    opener: Sequence[int] = (),
    *,
    opened: bool = False,
    then: Sequence[int] = (),
    repeats: bool = False,
    vocabulary: LLTokenizer | None = None,
) -> ThinkingBound:
    """The bound of a request. Without a `vocabulary`, markers are recognised by their tokens alone."""

    def marker(ids: Sequence[int]) -> Marker:
        if vocabulary is None or any(map(vocabulary.is_special_token, ids)):
            return Marker(tuple(ids))
        return Marker(tuple(ids), bytes(vocabulary.decode_bytes(list(ids))))

    spell = None if vocabulary is None else vocabulary.decode_bytes
    return ThinkingBound(tokens, marker(opener), marker(closer), tuple(then), opened, repeats, spell)


def _is_set(bits: np.ndarray, token: int) -> bool:
    """Whether a mask [words] allows a token."""
    return bool(int(bits[token // _BITS]) >> token % _BITS & 1)


class ThinkingMatcher:
    """The state of one row's reasoning, and the tokens that it allows beside `grammar`.

    A row asks it while the bound `is_near`, and otherwise the grammar alone. `count`: tokens of reasoning so far.
    """

    __slots__ = ("_bound", "_ids", "_ids_max", "_phase", "_text", "_then", "count", "grammar")

    begun = True
    """Whether it may force tokens."""

    def __init__(self, bound: ThinkingBound, grammar: RowMatcher | None = None) -> None:
        self.grammar = grammar
        self.count = 0
        self._bound = bound
        self._ids_max = max(len(bound.opener.ids), len(bound.closer.ids))
        self._phase: Phase = "inside" if bound.opened else "outside" if bound.repeats else "before"
        # The last tokens since the phase began, and bytes that may be the beginning of a marker.
        self._ids: tuple[int, ...] = ()
        self._text = b""
        # Tokens that follow a closer which was forced.
        self._then: tuple[int, ...] = ()

    @property
    def is_near(self) -> bool:
        """Whether a token may be ruled out within the widest verify block."""
        if self._then:
            return True
        return self._phase != "over" and self._bound.tokens - self.count <= FORCED_MAX

    @property
    def only(self) -> int | None:
        """The one token that may come next; None while there is a choice."""
        if self._then:
            return self._then[0]
        if self._phase != "inside" or self.count < self._bound.tokens:
            return None
        closer = self._bound.closer.ids
        begun = next(
            n for n in range(len(closer) - 1, -1, -1) if self._ids[len(self._ids) - n :] == closer[:n]
        )
        return closer[begun]

    @property
    def barred(self) -> int | None:
        """A token that may not come next: the one that would open reasoning again when the bound is spent."""
        opener = self._bound.opener.ids
        if self._phase != "outside" or self.count < self._bound.tokens or not opener:
            return None
        before = opener[:-1]
        return opener[-1] if self._ids[len(self._ids) - len(before) :] == before else None

    def follow(self, token: int) -> None:
        """Follow one more token of the output."""
        if self._then:
            # The grammar may have left no room for it.
            self._then = self._then[1:] if token == self._then[0] else ()
        if self._phase == "over":
            return
        self._ids = (*self._ids, token)[-self._ids_max :]
        bound = self._bound
        if bound.spell is not None:
            self._text += bound.spell([token])
        if self._phase == "inside":
            self.count += 1
            if bound.closer.ends(self._ids, self._text):
                self._close()
        elif bound.opener.ends(self._ids, self._text.lstrip() if self._phase == "before" else self._text):
            self._enter("inside")
        elif self._phase == "before" and not self._may_still_open():
            self._enter("over")
        marker = bound.closer if self._phase == "inside" else bound.opener
        if self._phase != "before":
            self._text = self._text[max(0, len(self._text) - len(marker.text) + 1) :]

    def _close(self) -> None:
        """End the reasoning. A closer that came because of the bound is followed by `then`."""
        self.count = max(0, self.count - len(self._bound.closer.ids))
        if self.count >= self._bound.tokens:
            self._then = self._bound.then
        self._enter("outside" if self._bound.repeats else "over")

    def _enter(self, phase: Phase) -> None:
        self._phase, self._ids, self._text = phase, (), b""

    def _may_still_open(self) -> bool:
        """Whether the output so far is white space and the beginning of an opener."""
        bound, text = self._bound, self._text.lstrip()
        if bound.opener.text:
            return bound.opener.text.startswith(text)
        if not text and bound.spell is not None:
            self._ids = ()
            return True
        return self._ids == bound.opener.ids[: len(self._ids)] and len(self._ids) < len(bound.opener.ids)

    # --- in the place of a grammar's matcher ---

    @property
    def forced(self) -> list[int]:
        """Next tokens about which there is no choice, at most FORCED_MAX."""
        ahead, run = self._copy(), list[int]()
        while len(run) < FORCED_MAX and (only := ahead.only) is not None:
            run.append(only)
            ahead.follow(only)
        if run or self.grammar is None or not self.grammar.begun:
            return run
        return self.grammar.forced

    def allowed(self, tokens: Sequence[int]) -> int:
        """Number of leading `tokens` that may be verified as drafts."""
        count = len(tokens) if self.grammar is None else self.grammar.allowed(tokens)
        ahead = self._copy()
        for index in range(count):
            token = int(tokens[index])
            if ahead.only not in (None, token) or ahead.barred == token:
                return index
            ahead.follow(token)
        return count

    def restrict(self, bits: np.ndarray, draft: Sequence[int]) -> None:
        """Rule out tokens in `bits` [positions, words] for the next token and after each token of `draft`.

        Where the grammar allows nothing that is left, it wins.
        """
        ahead = self._copy()
        for index in range(len(draft) + 1):
            if index:
                ahead.follow(int(draft[index - 1]))
            only, barred, allowed = ahead.only, ahead.barred, bits[index]
            if only is not None and _is_set(allowed, only):
                allowed[:] = 0
                allowed[only // _BITS] = 1 << only % _BITS
            elif barred is not None and _is_set(allowed, barred):
                word = int(allowed[barred // _BITS])
                allowed[barred // _BITS] = word & ~(1 << barred % _BITS)
                if not allowed.any():
                    allowed[barred // _BITS] = word

    @property
    def error(self) -> str:
        """The grammar's error in one line; empty without one."""
        return "" if self.grammar is None else self.grammar.error

    def _copy(self) -> ThinkingMatcher:
        """A copy to look ahead with, without the grammar."""
        copy = ThinkingMatcher(self._bound)
        copy.count, copy._phase, copy._then = self.count, self._phase, self._then
        copy._ids, copy._text = self._ids, self._text
        return copy
