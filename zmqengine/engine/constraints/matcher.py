"""What one row may still say."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher


class ConstraintBroken(Exception):
    """The grammar could not follow the output any further."""


class RowMatcher:
    """Follows the output of one row. `after` is what must come before the constraint begins; empty: at once.

    Until it begins every token is free but those that end the output.
    """

    __slots__ = ("_after", "_matcher", "_tail", "begun")

    def __init__(self, matcher: LLMatcher, after: tuple[int, ...], emitted: Sequence[int]) -> None:
        self._matcher = matcher
        self._after = after
        self._tail: list[int] = []
        self.begun = not after
        for token in emitted:
            self.consume(token)

    @property
    def parser(self) -> LLMatcher:
        """For the mask of the next token, once the constraint has begun."""
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole: nothing can follow."""
        return self.begun and bool(self._matcher.is_stopped())

    def consume(self, token: int) -> None:
        """One more token of the output. Raises `ConstraintBroken` if the grammar cannot have it."""
        if not self.begun:
            self._tail = [*self._tail, token][-len(self._after) :]
            self.begun = tuple(self._tail) == self._after
        elif not self._matcher.consume_token(token):
            raise ConstraintBroken(self.error or f"token {token} does not follow the constraint")

    @property
    def error(self) -> str:
        """What went wrong in the parser, in one line; empty if nothing did."""
        return " ".join(self._matcher.get_error().split())[:500]
