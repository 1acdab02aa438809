"""Kinds of tools that people give to models: those that lists foresee, and made-up ones."""

from collections.abc import Callable

from tools.pico.draw import Draw
from tools.pico.tools import kinds_answering, kinds_files, kinds_home, kinds_other
from tools.pico.tools import words as tool_words
from tools.pico.tools.kind import Kind, Slot, Value

KINDS: tuple[Kind, ...] = (
    *kinds_answering.KINDS,
    *kinds_home.KINDS,
    *kinds_files.KINDS,
    *kinds_other.KINDS,
)

# Sums that pico works out without a tool when none is offered for them.
ARITHMETIC = frozenset({"add", "subtract", "multiply"})


def made_up_kind(draw: Draw) -> Kind:
    """A tool that tells a property of some kind of object, for all that no list foresees."""
    known = draw.chance(0.85)
    asked = draw.one(tool_words.PROPERTIES) if known else tool_words.made_up(draw)
    thing = draw.one(tool_words.OBJECTS) if draw.chance(0.85) else tool_words.made_up(draw)
    verb = draw.one(tool_words.FETCH_VERBS)
    slot = Slot(
        draw.one(((thing,), ("name", "id", "key", "query"), (f"{thing}_name", f"{thing}_id"))),
        tool_words.named_thing,
        descriptions=(f"the {thing}", f"name of the {thing}", "the one to ask for"),
    )
    article = "an" if thing[0] in "aeiou" else "a"
    return Kind(
        asked,
        (
            f"{verb} {asked}",
            f"{verb} {thing} {asked}",
            f"{asked} of",
            asked,
            f"{thing} {asked}",
            f"{verb} {asked}",
        ),
        (
            f"Get the {asked} of {article} {thing}.",
            f"Returns the {asked} of the {thing}.",
            f"Look up the {asked} of {article} {thing}.",
            f"The {asked} of {article} {thing}",
            f"Tells the {asked}.",
        ),
        (slot,),
        (
            f"What is the {asked} of {{0}}?",
            f"Get the {asked} of {{0}}.",
            f"Tell me the {asked} of {{0}}.",
            f"Look up the {asked} of {{0}}.",
            f"What is the {asked} of the {thing} {{0}}?",
            f"Which {asked} has {{0}}?",
            f"{asked} of {{0}}?",
        ),
        _any_result,
        f"The {asked} of {{0}} is {{r}}.",
        ("result", asked, "value"),
    )


def _any_result(draw: Draw, values: list[Value]) -> Value:
    makers: tuple[Callable[[Draw], Value], ...] = (tool_words.named_thing, tool_words.number, tool_words.date)
    return draw.one(makers)(draw)
