"""Refuses grammars with a rule that no finite text satisfies: one that requires itself, an empty character class, or
terminals that exclude each other.

Only the structure of rules is read: names, alternatives, groups and repetitions. llguidance says whether a terminal
with an operator (`&`, `~`) is empty. Anything else counts as satisfiable; llguidance refuses what it cannot read.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

_HEAD = r"[?!]*+(?P<head>\w++)(?:::_)?+(?:\[[^\]\n]*+\])?+(?:\{[^}\n]*+\})?+(?:\.\d++)?+[ \t]*+:(?!:)"
_TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\\n]|\\.)*+"?)|(?P<regex>/(?:[^/\\\n]|\\.)++/?)|(?P<skip>(?://|#)[^\n]*+|->\s*+\w++)'
    r"|(?P<directive>%\w++\s*+)|(?P<name>\w++)|(?P<sign>\S)|(?P<line>\n\s*+)|\s"
)
_RULE = re.compile(_HEAD)


_OPERATED_MAX = 64
"""Terminals with operators that are looked at. Each takes 0.3 ms, and as many definitions as there are terminals."""


def check_rules(lark: str, is_empty: Callable[[str], bool], matches_nothing: Callable[[str], bool]) -> None:
    """Raise ValueError naming a rule that no finite text satisfies. `is_empty`: whether a regular expression, without
    its slashes, matches nothing; `matches_nothing`: whether a grammar does.

    Takes time with the length of the text: a rule is satisfied once one of its alternatives is, and an alternative once
    everything in it is (Dowling and Gallier, 1984).
    """
    rules = _Rules(is_empty)
    heads: list[tuple[str, int]] = []
    at, begins = 0, True
    while at < len(lark):
        head = _RULE.match(lark, at) if begins else None
        if head is not None:
            rules.begin(head["head"])
            heads.append((head["head"], at))
            at, begins = head.end(), False
            continue
        token = _TOKEN.match(lark, at)
        assert token is not None
        at = token.end()
        begins = token.lastgroup == "line" or (begins and token.lastgroup in ("skip", None))
        if token.lastgroup == "directive":
            at = _after_json(lark, at)
        rules.add(token.lastgroup, token[0])
    terminals = {
        name: lark[start:end]
        for (name, start), (_, end) in pairwise([*heads, ("", len(lark))])
        if name.strip("_")[:1].isupper()
    }
    operated = [name for name in terminals if name in rules.operated][:_OPERATED_MAX]
    for name in operated:
        if matches_nothing(f"start: {name}\n" + "\n".join(terminals.values())):
            rules.never(name)
    failed = rules.unsatisfied()
    if failed is not None:
        raise ValueError(f"the lark matches nothing: no text satisfies the rule {failed[:60]}")


def _after_json(lark: str, at: int) -> int:
    """The end of a value after a directive, such as that of `%json`; `at` where there is none."""
    if lark[at : at + 1] not in ("{", "["):
        return at
    try:
        return json.JSONDecoder().raw_decode(lark, at)[1]
    except (json.JSONDecodeError, RecursionError):
        return len(lark)


class _Rules:
    """Rules and groups, each a choice of alternatives, by number; and what each alternative waits for."""

    def __init__(self, is_empty: Callable[[str], bool]) -> None:
        self._is_empty = is_empty
        self._numbers: dict[str, int] = {}
        self._defined: dict[int, str] = {}
        self._choices = 0
        self._choice_of: list[int] = []
        self._waits_for: list[int] = []
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._groups: list[tuple[int, int]] = []
        self._choice = self._alternative = -1
        self._item: int | None = None
        self._never = self._new_choice()
        self._name = ""
        self.operated = set[str]()
        """Names whose definitions have operators of terminals."""

    def begin(self, name: str) -> None:
        """The rule that the next tokens belong to."""
        self._flush()
        self._groups.clear()
        self._name = name
        self._choice = self._numbered(name)
        self._defined[self._choice] = name
        self._alternative = self._new_alternative(self._choice)

    def add(self, kind: str | None, token: str) -> None:
        """A token of the rule that has begun."""
        if self._choice < 0 or kind in ("skip", "line", None):
            return
        if kind == "name":
            self._flush()
            self._item = self._numbered(token)
        elif kind == "regex":
            self._flush()
            self._item = self._never if self._is_empty(token.strip("/")) else None
        elif kind == "sign":
            self._sign(token)
        else:
            self._flush()

    def never(self, name: str) -> None:
        """Note that no text satisfies a rule."""
        self._flush()
        number = self._numbered(name)
        for alternative, choice in enumerate(self._choice_of):
            if choice == number:
                self._waits_for[alternative] += 1
                self._waiting[self._never].append(alternative)

    def unsatisfied(self) -> str | None:
        """A rule that no text satisfies, or None."""
        self._flush()
        satisfied = set[int]()
        left = [number for number in self._numbers.values() if number not in self._defined]
        left += [
            self._choice_of[alternative] for alternative, count in enumerate(self._waits_for) if not count
        ]
        while left:
            choice = left.pop()
            if choice in satisfied:
                continue
            satisfied.add(choice)
            for alternative in self._waiting[choice]:
                self._waits_for[alternative] -= 1
                if not self._waits_for[alternative]:
                    left.append(self._choice_of[alternative])
        return next((name for number, name in self._defined.items() if number not in satisfied), None)

    def _sign(self, sign: str) -> None:
        if sign in "([":
            self._flush()
            self._groups.append((self._choice, self._alternative))
            self._choice = self._new_choice()
            self._alternative = self._new_alternative(self._choice)
        elif sign in ")]" and self._groups:
            self._flush()
            self._item = self._choice if sign == ")" else None
            self._choice, self._alternative = self._groups.pop()
        elif sign == "|":
            self._flush()
            self._alternative = self._new_alternative(self._choice)
        elif sign in "?*{~&":
            # The item may be absent, or belongs to an operator that is not read: the alternative does not wait for it.
            self._item = None
            if sign in "~&":
                self.operated.add(self._name)

    def _flush(self) -> None:
        if self._item is not None:
            self._waits_for[self._alternative] += 1
            self._waiting[self._item].append(self._alternative)
        self._item = None

    def _numbered(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._new_choice()
        return self._numbers[name]

    def _new_choice(self) -> int:
        self._choices += 1
        return self._choices - 1

    def _new_alternative(self, choice: int) -> int:
        self._choice_of.append(choice)
        self._waits_for.append(0)
        return len(self._choice_of) - 1
