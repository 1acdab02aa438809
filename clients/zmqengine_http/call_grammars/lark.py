"""Rules of a Lark grammar, as llguidance reads them, for the tokens of one model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zmqengine_client.text.tokenizer import Tokenizer
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords
from zmqengine_http.serving.errors import bad_field

ANY_TEXT = "(?s:.)*"
_NO_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class OfferedFunction(NamedTuple):
    """A function that may be called. `strict`: what its schema asks for and cannot be enforced is refused."""

    name: str
    parameters: Mapping[str, object]
    strict: bool


class GrammarRules:
    """Expressions of a grammar; what they need of rules and terminals of their own is collected in `lines`.

    `unenforced` collects keywords of schemas that are passed over.
    """

    def __init__(self, tokenizer: Tokenizer, param: str = "tools") -> None:
        self.unenforced: set[str] = set()
        self._tokenizer = tokenizer
        self._param = param
        self._names: dict[str, str] = {}
        self._lines: list[str] = []

    def grammar(self, start: str) -> str:
        """The whole grammar, of what `start` describes."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def text(self, text: str) -> str:
        """Exactly this text."""
        return json.dumps(text, ensure_ascii=False)

    def token(self, text: str) -> int | None:
        """The token that is written so, if it is one."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and len(text) > 1 else None

    def marker(self, text: str) -> str:
        """A marker of the format: by its token where it is one, which text cannot stand for."""
        token = self.token(text)
        return self.text(text) if token is None else f"<[{token}]>"

    def is_end(self, text: str) -> bool:
        """Whether a marker is one of the tokens that end the output, which no grammar names."""
        return self.token(text) in self._tokenizer.eos_token_ids

    def rule(self, body: str) -> str:
        """The name of a rule of this body."""
        return self._named("r", body)

    def later_rule(self) -> tuple[str, int]:
        """The name and the place of a rule whose body `set_rule` tells: it may refer to itself."""
        self._lines.append("")
        return f"r{len(self._lines)}", len(self._lines) - 1

    def set_rule(self, name: str, place: int, body: str) -> None:
        """The body of a rule that was named before."""
        self._lines[place] = f"{name}: {body}"

    def expression(self, pattern: str) -> str:
        """A text that a regular expression matches."""
        return self._named("T", f"/{_inside_slashes(pattern)}/")

    def without(self, markers: Iterable[str], pattern: str = ANY_TEXT) -> str:
        """A text that matches and holds none of the markers."""
        # One negation: each of several would multiply what the lexer has to keep apart.
        found = "|".join(_inside_slashes(re.escape(marker)) for marker in markers)
        return self._named("T", f"/{_inside_slashes(pattern)}/ & ~/(?s:.*)(?:{found})(?s:.*)/")

    def terminal(self, body: str) -> str:
        """The name of a terminal: one text without seams."""
        return self._named("T", body)

    def up_to(self, marker: str) -> str:
        """Any text, and the first such marker behind it."""
        body = self.without([marker])
        if self.token(marker) is not None:
            return f"{body} {self.marker(marker)}"
        return self.terminal(f"{body} {self.text(marker)}")

    def json(self, schema: Mapping[str, object], options: Mapping[str, object]) -> str:
        """JSON of a schema; `options` are llguidance's."""
        given = schema.get("x-guidance")
        own = given if isinstance(given, Mapping) else {}
        return f"%json {json.dumps({**schema, 'x-guidance': {**own, **options}}, ensure_ascii=False)}"

    def arguments(self, function: OfferedFunction) -> str:
        """The arguments of a function as JSON."""
        if not function.strict:
            self.unenforced |= unenforced_keywords(function.parameters)
        options = {"whitespace_pattern": " ?", "lenient": not function.strict}
        return self.rule(self.json({"type": "object", **function.parameters}, options))

    def value(self, schema: Mapping[str, object], function: OfferedFunction) -> str:
        """JSON inside of arguments that are not: without white space but for one space after `,` and `:`."""
        return self.rule(self.json(schema, {**_NO_SPACE, "lenient": not function.strict}))

    def pass_over(self, function: OfferedFunction, keyword: str) -> None:
        """A keyword has no place in this format: a 400 if the function is strict."""
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
            self._lines[-1] = f"{name}: {body}"
        return name


def alternation(expressions: Iterable[str]) -> str:
    """Any of them."""
    return f"({' | '.join(expressions)})"


def _inside_slashes(pattern: str) -> str:
    # A line break would end the terminal, and a slash the expression.
    escaped = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], pattern)
    return escaped.replace("/", "\\/").replace("\n", "\\n")
