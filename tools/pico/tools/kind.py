"""What a kind of tool is: how it is named, described and asked for, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.pico.draw import Draw
from tools.pico.tools import words as tool_words

Value = str | int | float


@dataclass(frozen=True)
class Slot:
    """A parameter of a kind: what it may be called, and how to draw what a user gives for it."""

    names: tuple[str, ...]
    draw: Callable[[Draw], Value]
    kind: str = "string"
    descriptions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """Tools that do one thing.

    `names` are words to build a name of, `asks` what a user says, with {0}, {1} for the values of the slots.
    `result` draws what the tool answers, `result_keys` what the answer calls it when it is an object, and
    `reply` is what the model then says, with {r} for the result. Kinds of one `topic` can stand in for each other.
    """

    topic: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    result: Callable[[Draw, list[Value]], Value]
    reply: str
    result_keys: tuple[str, ...] = ("result",)


def choice(*choices: str) -> Callable[[Draw], Value]:
    """Draws one of these."""
    return lambda draw: draw.one(choices)


def said(text: str) -> Callable[[Draw, list[Value]], Value]:
    """A result that is always the same."""
    return lambda draw, values: text


WORD = Slot(("word", "term", "text", "query", "w"), tool_words.word, descriptions=("the word",))
TEXT = Slot(("text", "message", "content", "body", "note"), tool_words.phrase, descriptions=("the text",))
