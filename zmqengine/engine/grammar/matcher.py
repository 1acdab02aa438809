"""Follows the constraint of one row, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FORCED_MAX = 8
"""Maximum length of a run of forced tokens: that of the widest verify block."""
FOLLOW_S_MAX = 20.0
"""Processor time in which a resumed output is followed from its beginning. A token takes 0.1 ms under a tool's schema
and up to 12 ms under a hostile grammar, and other constraints wait for the thread."""
_SPELLINGS_MAX = 64
"""Maximum allowed tokens that are examined for being prefixes of one text; more count as a choice."""
_LEFT = "the output does not follow it"
# With this llguidance's errors begin to quote a token that it refuses, and the bytes that the grammar expects.
_QUOTED = 'token "'
NOTHING = "NoExtension"
"""Part of llguidance's error message where no token can follow."""
_NO_WAY_ON = "nothing can follow the output, which is not complete"


class ConstraintBroken(Exception):
    """The output left the grammar, or the grammar met a limit; the output is incomplete."""


def reason_of(error: str) -> str:
    """llguidance's error in one line, without its dump of the parser's state, which quotes the output."""
    return " ".join(error.partition("<state>")[0].partition("<backtrace>")[0].split())[:300]


class RowMatcher:
    """The constraint of one row. It begins after the consecutive tokens `after`; with none, at once.

    Until then every token that does not end the output is allowed. `followed`: the tokens of the output so far.
    """

    __slots__ = (
        "_after",
        "_forced",
        "_matcher",
        "_tail",
        "_tokens",
        "begun",
        "can_draft",
        "followed",
    )

    def __init__(
        self,
        tokens: LLTokenizer | None,
        matcher: LLMatcher | None,
        after: tuple[int, ...],
        emitted: Sequence[int],
    ) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._forced: list[int] | None = None
        self._after = after
        self._tail: list[int] = []
        self.begun = not after
        self.can_draft = True
        """Whether tokens after the next one can be tried and taken back."""
        self.followed: list[int] = []
        begun_s = time.thread_time()
        for token in emitted:
            if time.thread_time() - begun_s > FOLLOW_S_MAX:
                raise ConstraintBroken(f"to follow the output again takes more than {FOLLOW_S_MAX:.0f} s")
            # As when these tokens were sampled: only a mask is subject to the limit of parser items and renews the
            # lexer's fuel.
            if self.begun:
                self.parser.compute_bitmask()
            self.consume(token)

    @property
    def parser(self) -> LLMatcher:
        """The parser that makes the mask of the next token, once the constraint has begun."""
        assert self._matcher is not None, "a constraint that has not begun has no parser"
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete: no token can follow."""
        return self.begun and bool(self.parser.is_stopped()) and not self.parser.is_error()

    @property
    def forced(self) -> list[int]:
        """Next tokens whose text the grammar leaves no choice about, each the longest; at most FORCED_MAX."""
        if self._forced is None:
            self._forced = self._forced_run() if self.begun and not self.is_complete else []
        return self._forced

    def _forced_run(self) -> list[int]:
        parser, run = self.parser, list[int]()
        while len(run) < FORCED_MAX:
            token = self._only_text(parser.compute_bitmask())
            if token is None:
                break
            parser = parser if run else parser.deep_copy()
            parser.consume_token(token)
            run.append(token)
        return run

    def _only_text(self, mask: bytes) -> int | None:
        """The token of a mask of which all others are prefixes; None if there is none, or one of them has no text."""
        bits = int.from_bytes(mask, "little")
        if bits.bit_count() > _SPELLINGS_MAX:
            return None
        assert self._tokens is not None
        longest, text, seen = None, b"", list[bytes]()
        while bits:
            token = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            spelling = bytes(self._tokens.decode_bytes([token]))
            if self._tokens.is_special_token(token) or not spelling:
                return None
            seen.append(spelling)
            if len(spelling) > len(text):
                longest, text = token, spelling
        return longest if all(map(text.startswith, seen)) else None

    def allowed(self, tokens: Sequence[int]) -> int:
        """Number of leading `tokens` that may be verified as drafts; 0 until the constraint has begun."""
        return int(self.parser.validate_tokens(list(tokens))) if self.begun and self.can_draft else 0

    def consume(self, token: int) -> None:
        """Follow one more token of the output. Raises `ConstraintBroken` if the grammar cannot."""
        self._forced = None
        self.followed.append(token)
        if not self.begun:
            self._tail = [*self._tail, token][-len(self._after) :]
            self.begun = tuple(self._tail) == self._after
            return
        follows = self.parser.consume_token(token)
        # A parser in error accepts an end token: without this check the row would end as if it were complete.
        if self.parser.is_error() or not follows:
            raise ConstraintBroken(self.error or _LEFT)

    @property
    def error(self) -> str:
        """The parser's error in one line, for a log: it quotes nothing of the output; empty without one."""
        reason = "" if self._matcher is None else reason_of(self._matcher.get_error())
        if NOTHING in reason:
            return _NO_WAY_ON
        return _LEFT if _QUOTED in reason else reason


class NeverBegins:
    """A constraint that never begins: it allows every token that does not end the output."""

    def start(self, emitted: Sequence[int]) -> RowMatcher:
        """A matcher for a row with the output `emitted` so far."""
        return RowMatcher(None, None, (-1,), emitted)

    def keep(self, matcher: RowMatcher) -> None:
        """Keep nothing: there is no parser."""
