"""Turns in which a few facts are to be written as a small JSON object of a given shape."""

import json
from collections.abc import Callable

from tools.pico import words
from tools.pico.chat import Turn
from tools.pico.draw import Draw
from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import Value

Field = tuple[str, str, Callable[[Draw], Value]]
"""A key, its type in JSON Schema, and how to draw a value."""


def object_turn(draw: Draw) -> Turn:
    """Facts in a sentence, and the wish for an object with some of them."""
    return draw.keyed(lambda: _object_turn(draw), lambda turn: turn.key)


def _count(draw: Draw) -> Value:
    return draw.number(1, 99)


def _one(*choices: str) -> Callable[[Draw], Value]:
    return lambda draw: draw.one(choices)


# Names of schemas, sentences with {0}, {1}, {2} for the facts, and the facts.
_RECORDS: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[Field, ...]], ...] = (
    (
        ("person", "user", "contact"),
        (
            "{0} is {1} years old and lives in {2}.",
            "{0} from {2} is {1}.",
            "This is {0}, {1} years old, from {2}.",
        ),
        (
            ("name", "string", tool_words.person),
            ("age", "integer", _count),
            ("city", "string", tool_words.place),
        ),
    ),
    (
        ("pet", "animal"),
        ("{0} is a {2} {1}.", "The {2} {1} is called {0}.", "A {2} {1} named {0}."),
        (
            ("name", "string", tool_words.person),
            ("kind", "string", _one(*words.ANIMALS)),
            ("color", "string", _one(*words.COLORS)),
        ),
    ),
    (
        ("order", "item", "purchase"),
        ("{2} wants {1} of the {0}.", "{2} ordered the {0}, {1} pieces.", "{1} times {0} for {2}."),
        (
            ("item", "string", tool_words.word),
            ("count", "integer", _count),
            ("customer", "string", tool_words.person),
        ),
    ),
    (
        ("event", "meeting"),
        ("The {0} is on {1} at {2}.", "On {1} at {2} there is the {0}.", "{0}: {1}, {2}."),
        (
            ("title", "string", tool_words.word),
            ("day", "string", _one(*tool_words.DAYS)),
            ("time", "string", tool_words.clock),
        ),
    ),
    (
        ("weather", "report"),
        ("It is {1} in {0}, {2} degrees.", "In {0} it is {1} at {2} degrees."),
        (
            ("city", "string", tool_words.place),
            ("weather", "string", _one(*tool_words.WEATHER)),
            ("temperature", "integer", _count),
        ),
    ),
    (
        ("light", "device"),
        ("The {0} is {1} and its light is {2}.", "Light of the {0}: {1}, {2}."),
        (
            ("room", "string", _one(*tool_words.ROOMS)),
            ("state", "string", _one("on", "off")),
            ("color", "string", _one(*words.COLORS)),
        ),
    ),
)


def _object_turn(draw: Draw) -> Turn:
    schema_names, sentences, fields = draw.one(_RECORDS)
    values = [make(draw) for _, _, make in fields]
    facts = draw.one(sentences).format(*values)
    order = draw.several(range(len(fields)), draw.number(1, len(fields)))
    if draw.chance(0.6):
        order.sort()
    keys = [fields[index][0] for index in order]
    shape = ", ".join(f'"{fields[index][0]}": {fields[index][1]}' for index in order)
    listed = " and ".join([", ".join(keys[:-1]), keys[-1]]) if len(keys) > 1 else keys[0]
    name = draw.one(schema_names)
    user = draw.one(
        [
            f"{facts} Write this as JSON with {listed}.",
            f"{facts} Answer with a JSON object: {{{shape}}}",
            f"Write a JSON object with the keys {listed}. {facts}",
            f"The schema {name} is {{{shape}}}. Give me a {name}: {facts}",
            f"{name}: {{{shape}}}\n{facts}",
            f"Extract {listed} as JSON. {facts}",
        ]
    )
    answer = json.dumps({fields[index][0]: values[index] for index in order}, ensure_ascii=False)
    return Turn("JSON object", user, answer, answer, f"json/{facts}")
