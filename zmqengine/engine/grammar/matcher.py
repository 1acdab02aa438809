"""What one row may still say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class ConstraintBroken(Exception):
    """The grammar could not follow the output any further."""


class RowMatcher:
    """Follows the output of one row. The tokens of `after` must come in a row before it begins; empty: at once.

    Until it begins every token is free but those that end the output.
    """

    __slots__ = ("_after", "_forced", "_matcher", "_tail", "begun")

    def __init__(self, matcher: LLMatcher | None, after: tuple[int, ...], emitted: Sequence[int]) -> None:
        self._matcher = matcher
        self._after = after
        self._tail: list[int] = []
        self._forced: list[int] | None = None
        self.begun = not after
        for token in emitted:
            self.consume(token)

    @property
    def parser(self) -> LLMatcher:
        """For the mask of the next token, once the constraint has begun."""
        assert self._matcher is not None, "what never begins has no parser"
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole: nothing can follow."""
        return self.begun and bool(self.parser.is_stopped())

    @property
    def forced(self) -> list[int]:
        """Tokens that spell what must come now; empty where there is a choice."""
        if self._forced is None:
            self._forced = self.parser.compute_ff_tokens() if self.begun and not self.is_complete else []
        return self._forced

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, one after the other, may come now; 0 until the constraint has begun."""
        return int(self.parser.validate_tokens(list(tokens))) if self.begun else 0

    def consume(self, token: int) -> None:
        """One more token of the output. Raises `ConstraintBroken` if the grammar cannot have it."""
        self._forced = None
        if not self.begun:
            self._tail = [*self._tail, token][-len(self._after) :]
            self.begun = tuple(self._tail) == self._after
        elif not self.parser.consume_token(token):
            raise ConstraintBroken(self.error or f"token {token} does not follow the constraint")

    @property
    def error(self) -> str:
        """What went wrong in the parser, in one line; empty if nothing did."""
        return "" if self._matcher is None else " ".join(self._matcher.get_error().split())[:500]


class NeverBegins:
    """In place of a grammar: no parser, and every token is free but those that end the output."""

    def start(self, emitted: Sequence[int]) -> RowMatcher:
        """For a row that has made `emitted` so far."""
        return RowMatcher(None, (-1,), emitted)
