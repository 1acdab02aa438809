"""Builds Lark grammars in llguidance's dialect, for the tokens of one model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX
from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords
from zmqengine_http.serving.errors import bad_field

ANY_TEXT = "(?s:.)*"
_NO_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class OfferedFunction(NamedTuple):
    """A function that may be called. `strict`: schema keywords that cannot be enforced are refused, not
    skipped."""

    name: str
    parameters: Mapping[str, object]
    strict: bool


class GrammarRules:
    """Builds the expressions of one grammar, and collects the named rules and terminals that they refer to.

    `unenforced` collects the schema keywords that the grammar skips. A grammar that grows longer than a worker takes
    is refused with a 400 while it is built: one place of a schema can be written for each reference to it.
    """

    def __init__(self, tokenizer: Tokenizer, param: str = "tools") -> None:
        self.unenforced: set[str] = set()
        self._tokenizer = tokenizer
        self._param = param
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._chars = 0

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines, ""])

    def text(self, text: str) -> str:
        """A literal text."""
        return json.dumps(text, ensure_ascii=False)

    def token(self, text: str) -> int | None:
        """The id of the single token with this text, or None."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and len(text) > 1 else None

    def marker(self, text: str) -> str:
        """A marker of the format: by token id if it is one token, since its text would match other tokens."""
        token = self.token(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def is_end(self, text: str) -> bool:
        """Whether a marker is an end token of the model; grammars must not contain those."""
        return self.token(text) in self._tokenizer.eos_token_ids

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        return self._named("r", body)

    def later_rule(self) -> tuple[str, int]:
        """Reserve a rule whose body, which may refer to itself, is given to `set_rule`; returns its name and
        index."""
        self._lines.append("")
        return f"r{len(self._lines)}", len(self._lines) - 1

    def set_rule(self, name: str, place: int, body: str) -> None:
        """Set the body of a rule reserved by `later_rule`."""
        self._chars += len(body)
        if self._chars > CONSTRAINT_CHARS_MAX:
            raise too_long_grammar(self._param)
        self._lines[place] = f"{name}: {body}"

    def expression(self, pattern: str) -> str:
        """A text that matches a regular expression."""
        return self._named("T", f"/{_inside_slashes(pattern)}/")

    def without(self, markers: Iterable[str], pattern: str = ANY_TEXT) -> str:
        """A text that matches `pattern` and contains none of the markers."""
        # One negation of an alternation: several negations would multiply the states of the lexer.
        found = "|".join(_inside_slashes(re.escape(marker)) for marker in markers)
        return self._named("T", f"/{_inside_slashes(pattern)}/ & ~/(?s:.*)(?:{found})(?s:.*)/")

    def terminal(self, body: str) -> str:
        """The name of a terminal, which the lexer matches as one token."""
        return self._named("T", body)

    def up_to(self, marker: str) -> str:
        """Any text up to and including the first such marker."""
        body = self.without([marker])
        if self.token(marker) is not None:
            return f"{body} {self.marker(marker)}"
        return self.terminal(f"{body} {self.text(marker)}")

    def json(self, schema: Mapping[str, object], options: Mapping[str, object]) -> str:
        """JSON of a schema; `options` are llguidance's JSON options."""
        given = schema.get("x-guidance")
        own = given if isinstance(given, Mapping) else {}
        return f"%json {json.dumps({**schema, 'x-guidance': {**own, **options}}, ensure_ascii=False)}"

    def arguments(self, function: OfferedFunction) -> str:
        if not function.strict:
            self.unenforced |= unenforced_keywords(function.parameters)
        options = {"whitespace_pattern": " ?", "lenient": not function.strict}
        return self.rule(self.json({"type": "object", **function.parameters}, options))

    def value(self, schema: Mapping[str, object], function: OfferedFunction) -> str:
        """JSON inside arguments that are not JSON: without white space except one space after `,` and `:`."""
        return self.rule(self.json(schema, {**_NO_SPACE, "lenient": not function.strict}))

    def skip_keyword(self, function: OfferedFunction, keyword: str) -> None:
        """Record a keyword that this format cannot enforce. Raises a 400 if the function is strict."""
        if function.strict:
            raise bad_field(
                self._param,
                f"{function.name}: the schema has keywords that cannot be enforced in the format of this model: "
                f'"{keyword}"',
            )
        self.unenforced.add(keyword)

    def _named(self, letter: str, body: str) -> str:
        name = self._names.get(body)
        if name is None:
            self._lines.append("")
            name = self._names[body] = f"{letter}{len(self._lines)}"
            self.set_rule(name, len(self._lines) - 1, body)
        return name


def too_long_grammar(param: str) -> Exception:
    """A 400 for a constraint that is longer than a worker takes."""
    return bad_field(param, f"over {CONSTRAINT_CHARS_MAX} characters as a grammar: shorten the schemas")


def alternation(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _inside_slashes(pattern: str) -> str:
    # In Lark a line break ends the terminal, and a slash the regular expression.
    escaped = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], pattern)
    return escaped.replace("/", "\\/").replace("\n", "\\n")
