"""JSON documents, each with a field to change, as chats; nothing in them can be guessed.

What is asked for is a JSON merge patch (RFC 7396) of one field. Keys and values are made of syllables at random. No
word of the held-out split is in the train split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from tools.pico.chat import Turn
from tools.pico.corpus import ChatDocument
from tools.pico.draw import Draw, Split

FIELDS_MAX = 16
# In a short document much is to be changed.
_SHORT_SHARE, _SHORT_FIELDS_MAX = 0.5, 4
_ONSETS = "bdfgklmnprstv"
_VOWELS = "aeiou"
_CODAS = ("", "l", "n", "s")
_WORDS_FIRST, _WORDS_LAST = 3, 12


class Edit(NamedTuple):
    """A document, the patch that is asked for, and the document as it is to be."""

    text: str
    patch: str
    answer: str

    @property
    def question(self) -> str:
        """What the user says."""
        return f"{self.text}\n{self.patch}"

    @property
    def chat(self) -> ChatDocument:
        """As a model is trained on it."""
        return ChatDocument("", (Turn("edit", self.question, self.answer, self.answer, self.text),))


def edit(draw: Draw, fields: int) -> Edit:
    """A document of so many fields, with one that is to get another value."""
    document: dict[str, object] = {}
    while len(document) < fields:
        document[_word(draw)] = _value(draw)
    key = draw.one(list(document))
    new = document[key]
    while new == document[key]:
        new = _value(draw)
    return Edit(_dumps(document), _dumps({key: new}), _dumps(document | {key: new}))


def edits(split: Split, seed: int, fields_min: int = 1) -> Iterator[Edit]:
    """An endless stream of documents of one split with at most `FIELDS_MAX` fields."""
    draw = Draw(seed, split)
    while True:
        yield edit(draw, draw.number(fields_min, FIELDS_MAX))


def exercises(seed: int) -> Iterator[ChatDocument]:
    """An endless stream of documents of the train split, half of them short."""
    draw = Draw(seed, "train")
    while True:
        fields_max = _SHORT_FIELDS_MAX if draw.chance(_SHORT_SHARE) else FIELDS_MAX
        yield edit(draw, draw.number(1, fields_max)).chat


def lessons(seed: int, documents: int) -> Iterator[ChatDocument]:
    """What is learnt first: lists of words to say again, short and then longer, and more and more often documents."""
    draw = Draw(seed, "train")
    for number in range(documents):
        progress = number / documents
        if draw.chance(0.8 * progress):
            yield edit(draw, draw.number(1, 1 + round(5 * progress))).chat
            continue
        words = draw.number(1, round(_WORDS_FIRST + (_WORDS_LAST - _WORDS_FIRST) * progress))
        text = " ".join(_word(draw) for _ in range(words))
        yield ChatDocument("", (Turn("repeat", text, text, text, text),))


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _word(draw: Draw) -> str:
    return draw.keyed(lambda: _syllable(draw) + _syllable(draw), str)


def _syllable(draw: Draw) -> str:
    return draw.one(_ONSETS) + draw.one(_VOWELS) + draw.one(_CODAS)


def _value(draw: Draw) -> object:
    choice = draw.number(0, 9)
    if choice < 6:
        return _word(draw)
    if choice < 7:
        return f"{_word(draw)} {_word(draw)}"
    return draw.number(0, 9999) if choice < 9 else draw.one((True, False, None))
