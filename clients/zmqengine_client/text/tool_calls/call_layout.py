"""The description of how a family writes its calls, from which they are written and constrained.

Texts of a layout hold places: «name» of the function, «arguments», «number» (of the call), «space» and «line» (white
space that may be left out), and in `argument` the «key», and whether the value is a «string».
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PLACE = re.compile("«([a-z]+)»")


class LiteralStyle(NamedTuple):
    """The literals of a language: `quote` delimits strings, empty for JSON strings; `bare_keys` need no quotes."""

    words: Mapping[object, str]
    comma: str
    colon: str
    quote: str = ""
    bare_keys: bool = False
    keywords: bool = False
    """The arguments are those of a Python call."""


PYTHON = LiteralStyle({True: "True", False: "False", None: "None"}, ", ", ": ", keywords=True)
GEMMA = LiteralStyle({True: "true", False: "false", None: "null"}, ",", ":", '<|"|>', bare_keys=True)
FUNCTION_GEMMA = GEMMA._replace(quote="<escape>")


class CallLayout(NamedTuple):
    """The text behind the marker that starts calls: `before`, calls with `between` them, `after`.

    Arguments are JSON, or literals in a `style`, or tagged: each is `argument`, the value, `closing` and `behind`; with
    `typed` a value that is not certainly a string is JSON. `markers` are those within the texts that a model may have
    as one token. `when` is a text in the chat templates, or a token, of the models that write so. Without `several`
    there is one call.
    """

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    style: LiteralStyle | None = None
    argument: str = ""
    closing: str = ""
    behind: str = ""
    typed: bool = False
    markers: tuple[str, ...] = ()
    when: str = ""
    several: bool = True


def chosen(layouts: Sequence[CallLayout], knows: Callable[[str], bool]) -> list[CallLayout]:
    """The layouts of a model, which `knows` some texts: those for one that it knows, or those for no text."""
    special = [layout for layout in layouts if layout.when and knows(layout.when)]
    return special[:1] or [layout for layout in layouts if not layout.when]


def write_calls(layout: CallLayout, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    """Calls, names and arguments, in this layout, without the marker before them."""
    each = (_call(layout, name, arguments, number) for number, (name, arguments) in enumerate(calls))
    return _filled(layout.before) + _filled(layout.between, space=" ").join(each) + _filled(layout.after)


def _call(layout: CallLayout, name: str, arguments: Mapping[str, object], number: int) -> str:
    return _filled(layout.call, name=name, number=str(number), arguments=_arguments(layout, arguments))


def _filled(text: str, **places: str) -> str:
    return PLACE.sub(lambda place: {"space": "", "line": "\n", **places}[place[1]], text)


def _arguments(layout: CallLayout, arguments: Mapping[str, object]) -> str:
    if layout.style is not None:
        return _members(layout.style, arguments, keywords=layout.style.keywords)
    if not layout.argument:
        return json.dumps(arguments, ensure_ascii=False)
    return "".join(_argument(layout, key, value) for key, value in arguments.items())


def _argument(layout: CallLayout, key: str, value: object) -> str:
    head = _filled(layout.argument, key=key, string="true" if isinstance(value, str) else "false")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{head}{text}{layout.closing}{_filled(layout.behind)}"


def _literal(style: LiteralStyle, value: object) -> str:
    if isinstance(value, str):
        return f"{style.quote}{value}{style.quote}" if style.quote else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{_members(style, value)}}}"
    if isinstance(value, list):
        return f"[{style.comma.join(_literal(style, each) for each in value)}]"
    return style.words[value] if value is None or isinstance(value, bool) else json.dumps(value)


def _members(style: LiteralStyle, members: Mapping[str, object], *, keywords: bool = False) -> str:
    def key(name: str) -> str:
        if keywords:
            return f"{name}="
        bare = style.bare_keys and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        return f"{name if bare else _literal(style, name)}{style.colon}"

    return style.comma.join(f"{key(name)}{_literal(style, value)}" for name, value in members.items())
