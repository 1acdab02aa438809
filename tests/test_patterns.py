"""Regular expressions of the product: none may take more than time linear in the text that it is given.

A pattern is refused if an unbounded repetition stands within another one, at the start of a pattern that is searched
for, or next to another one that matches the same characters.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_OLD = sys.version_info < (3, 11)
sre_constants: Any = importlib.import_module("sre_constants" if _OLD else "re._constants")
sre_parse: Any = importlib.import_module("sre_parse" if _OLD else "re._parser")

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("clients", "zmqengine")
REPEATS = {
    getattr(sre_constants, name)
    for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if hasattr(sre_constants, name)
}
UNBOUNDED = 1000
"""Repetitions from here on count as unbounded."""
SEARCHING = frozenset(("search", "sub", "subn", "split", "findall", "finditer"))
MATCHING = frozenset(("match", "fullmatch"))
MATCHERS = frozenset(("CallFormat", "Tags", "_tagged", "_json"))
"""Functions that take patterns to match them at one place: headers, tails and opening tags of calls."""

ALLOWED: dict[str, str] = {
    "zmqengine/engine/models/arrays.py": "whole names of a checkpoint's arrays, by rules of the code",
}
"""What was reviewed: a pattern or a file, and the reason for which its texts are bounded or trusted."""


class Pattern(NamedTuple):
    """A pattern of the product: where it is written, its text, and whether a text is searched for it."""

    place: str
    text: str
    searched: bool


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    """All patterns that the product compiles."""
    paths = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))]
    return tuple(pattern for path in paths for pattern in _patterns_of(path))


def _patterns_of(path: Path) -> Iterator[Pattern]:
    text = path.read_text("utf-8")
    if "re." not in text:
        return
    tree = ast.parse(text)
    known = _Constants(tree)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
            continue
        if node.func.attr in SEARCHING or node.func.attr in MATCHING:
            searched = node.func.attr in SEARCHING
        elif node.func.attr == "compile":
            searched = _is_searched(node, tree, parents)
        else:
            continue
        found = known.text(node.args[0])
        yield Pattern(
            f"{path.relative_to(ROOT)}:{node.lineno}", UNKNOWN if found is None else found, searched
        )


_SCRIPT_PATTERN = re.compile(
    r"[(=,:!&|?]\s*/(?![/*])((?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+)/[dgimsuvy]*"
)
"""A regular expression of JavaScript, where an operand may stand."""


def script_patterns() -> Iterator[Pattern]:
    """The patterns of the page, all of which are searched for in texts of users and models."""
    for path in sorted((ROOT / "clients").rglob("*.js")):
        if "vendor" in path.parts:
            continue
        text = path.read_text("utf-8")
        for found in _SCRIPT_PATTERN.finditer(text):
            line = text.count("\n", 0, found.start(1)) + 1
            yield Pattern(f"{path.relative_to(ROOT)}:{line}", found[1], searched=True)


def _is_searched(compiled: ast.Call, tree: ast.Module, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a compiled pattern is used for anything but matches at one place."""
    parent = parents[compiled]
    if not (isinstance(parent, (ast.Assign, ast.AnnAssign))):
        return not _is_matched(compiled, parents)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
    uses = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(target, ast.Name) and node.id == target.id
        and isinstance(node.ctx, ast.Load)
    ]  # fmt: skip
    return not all(_is_matched(use, parents) for use in uses)


def _is_matched(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[use]
    while isinstance(parent, (ast.keyword, ast.IfExp, ast.BoolOp)):
        parent = parents[parent]
    if isinstance(parent, ast.arguments):
        # A default.
        function = parents[parent]
        return isinstance(function, ast.FunctionDef) and function.name in MATCHERS
    if isinstance(parent, ast.Attribute):
        return parent.attr in (*MATCHING, "pattern")
    return isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id in MATCHERS


UNKNOWN = "(unknown)"


class _Constants:
    """The texts of a module's constants and of expressions of them; a text of other origin stands as `x`."""

    def __init__(self, tree: ast.Module) -> None:
        self._named: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._named[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self._named[node.target.id] = node.value

    def text(self, node: ast.expr) -> str | None:
        """The text of an expression, or None if it is no text that the module holds."""
        if isinstance(node, ast.Constant):
            value = node.value
            return (
                value.decode("latin-1")
                if isinstance(value, bytes)
                else value
                if isinstance(value, str)
                else None
            )
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part) or "x" for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.text(node.left), self.text(node.right)
            return None if left is None or right is None else left + right
        if isinstance(node, ast.Name) and node.id in self._named:
            return self.text(self._named[node.id])
        if isinstance(node, ast.Attribute) and node.attr == "pattern":
            return self.text(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "compile":
                return self.text(node.args[0])
            if node.func.attr == "escape":
                inner = self.text(node.args[0])
                return None if inner is None else re.escape(inner)
            if node.func.attr == "join" and ast.unparse(node.args[0]).startswith("map(re.escape, "):
                joint = self.text(node.func.value)
                return None if joint is None else f"x{joint}x"
        return None


def fault(pattern: str, *, searched: bool = True) -> str | None:
    """The reason for which a pattern may take more than linear time, or None."""
    tree = list(sre_parse.parse(pattern))
    if searched and _begins_unbounded(tree):
        return "begins with an unbounded repetition: a search tries it at each character"
    return _fault_of(tree)


def _begins_unbounded(items: list[Any], *, more: bool = False) -> bool:
    """Whether items begin with an unbounded repetition, after which a match can still fail; `more`: at what follows."""
    if not items:
        return False
    op, argument = items[0]
    more = more or len(items) > 1
    if _is_unbounded(items[0]):
        return more
    if op is sre_constants.SUBPATTERN:
        return _begins_unbounded(list(argument[-1]), more=more)
    if op is sre_constants.BRANCH:
        return any(_begins_unbounded(list(part), more=more) for part in argument[1])
    return False


def _is_unbounded(item: Any) -> bool:
    return item is not None and item[0] in REPEATS and item[1][1] >= UNBOUNDED


def _fault_of(items: list[Any]) -> str | None:
    for op, argument in items:
        for inner in _inside(op, argument):
            reason = _fault_of(list(inner))
            if reason:
                return reason
        if _is_unbounded((op, argument)) and any(_repeats(part) for part in argument[2]):
            return "repeats a repetition"
    return _neighbours(items)


def _inside(op: Any, argument: Any) -> list[Any]:
    if op in REPEATS:
        return [argument[2]]
    if op is sre_constants.SUBPATTERN:
        return [argument[-1]]
    if op is sre_constants.BRANCH:
        return list(argument[1])
    return [argument[1]] if op in (sre_constants.ASSERT, sre_constants.ASSERT_NOT) else []


def _repeats(item: Any) -> bool:
    """Whether an item that is repeated is, without a delimiter of its own, an unbounded repetition."""
    op, argument = item
    if _is_unbounded(item):
        return True
    return any(len(inner) == 1 and _repeats(inner[0]) for inner in _inside(op, argument) if op not in (
        sre_constants.ASSERT, sre_constants.ASSERT_NOT))  # fmt: skip


def _neighbours(items: list[Any]) -> str | None:
    """Two unbounded repetitions with nothing between them that must match."""
    before: Any = None
    for item in items:
        op, argument = item
        if _is_unbounded(item):
            if before is not None and _overlap(before, item):
                return "repeats the same characters twice in a row"
            before = item
        elif op in REPEATS and argument[0] == 0:
            # Something optional: it may be absent, so its neighbours touch; and its own ends touch them.
            inner = list(argument[2])
            start = inner[0] if inner else None
            if before is not None and _is_unbounded(start) and _overlap(before, start) and len(inner) == 1:
                return "repeats the same characters twice in a row"
        elif op not in (sre_constants.AT, sre_constants.ASSERT, sre_constants.ASSERT_NOT):
            before = None
    return None


def _overlap(one: Any, other: Any) -> bool:
    """Whether some character fits both repetitions."""
    first, second = (re.compile(_class_of(item)) for item in (one, other))
    return any(first.fullmatch(chr(code)) and second.fullmatch(chr(code)) for code in range(0x250))


def _class_of(item: Any) -> str:
    """A pattern of one character that begins what is repeated."""
    op, argument = next(iter(item[1][2]))
    if op is sre_constants.SUBPATTERN:
        op, argument = next(iter(argument[-1]))
    if op is sre_constants.LITERAL:
        return re.escape(chr(argument))
    if op is sre_constants.NOT_LITERAL:
        return f"[^{re.escape(chr(argument))}]"
    if op is sre_constants.IN:
        return f"[{''.join(_member(each) for each in argument)}]"
    return "(?s:.)"


_CATEGORIES = {
    f"CATEGORY_{no}{name}": letter
    for name, pair in (("SPACE", "sS"), ("DIGIT", "dD"), ("WORD", "wW"))
    for no, letter in (("", f"\\{pair[0]}"), ("NOT_", f"\\{pair[1]}"))
}


def _member(member: Any) -> str:
    op, argument = member
    if op is sre_constants.NEGATE:
        return "^"
    if op is sre_constants.RANGE:
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    if op is sre_constants.CATEGORY:
        return _CATEGORIES[str(argument)]
    return re.escape(chr(argument))


def test_every_pattern_takes_linear_time() -> None:
    """Or stands in `ALLOWED` with a reason."""
    for pattern in (*patterns(), *script_patterns()):
        if pattern.text in ALLOWED or pattern.place.rsplit(":", 1)[0] in ALLOWED:
            continue
        assert pattern.text != UNKNOWN, f"{pattern.place}: write a constant, or allow the file with a reason"
        assert fault(pattern.text, searched=pattern.searched) is None, pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"[ \t]*<total_tokens>", r"\s*(?:<a>)?\s*b", r"(?:a+)+b", r"(a*)*", r"(?:\s*)+x", r"x\s*\[?\s*\{", r"x.*.*y",
        r"x[^>]*[^<]*y", r"(?:\s*a|b)x", r"xa*a*b", r"x\w+?[a-z]*",
    ],
)  # fmt: skip
def test_hostile_patterns_are_refused(pattern: str) -> None:
    """The kinds that froze the front-end."""
    assert fault(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"<total_tokens>[^<]{0,80}</total_tokens>[ \t]*\n?",
        r'"(?:[^"\\]|\\.)*"',
        r"a\s*(?:\[\s*)?\{",
        r"x\w+\s*y",
        r"^\s*x",
    ],
)
def test_linear_patterns_are_taken(pattern: str) -> None:
    """An anchor, a delimiter or a bound makes a repetition safe."""
    assert fault(pattern) is None


def test_patterns_of_scripts_are_found() -> None:
    """A lint that reads none of them passes as well."""
    assert {r"`+", r"\s+", r"[^\w -]", r"\s"} <= {each.text for each in script_patterns()}
    found = _SCRIPT_PATTERN.findall("a = b / c / d; x.replace(/[/]+a\\/*/g, 1); // (/x/")
    assert found == ["[/]+a\\/*", "x"]


def test_what_is_allowed_is_still_there() -> None:
    """An exception for a pattern that is gone would hide the next one."""
    there = {text for each in patterns() for text in (each.text, each.place.rsplit(":", 1)[0])}
    assert set(ALLOWED) <= there
