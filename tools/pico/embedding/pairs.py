"""Pairs of texts that belong together: two tellings of an event, a question and what answers it, a sentence of a
story and those around it."""

from collections.abc import Iterator
from typing import NamedTuple

from tools.pico import chat
from tools.pico.draw import Draw, Split
from tools.pico.embedding.events import any_event
from tools.pico.story import tell
from tools.pico.words import REPEATABLE

_DROPPED_WORDS = 0.1
_COMMON = (
    "the", "a", "an", "of", "in", "on", "to", "was", "is", "and", "with", "for", "it", "that", "his", "her", "had",
    "there", "by", "from", "all", "but", "so",
)  # fmt: skip


class Pair(NamedTuple):
    """Two texts whose vectors should be near. Pairs of one `key` may be as near, and are no negatives."""

    left: str
    right: str
    key: str


def pairs(split: Split, seed: int) -> Iterator[Pair]:
    """An endless stream of pairs of one split; the same seed gives the same stream."""
    draw = Draw(seed, split)
    while True:
        pair = _pair(draw)
        if pair.left != pair.right:
            yield pair


def _pair(draw: Draw) -> Pair:
    choice = draw.number(0, 99)
    if choice < 15:
        return _same_words(draw)
    if choice < 52:
        event = any_event(draw)
        return Pair(_with_gaps(draw, event.tell(draw)), event.tell(draw), event.key)
    if choice < 80:
        event = any_event(draw)
        return Pair(_with_gaps(draw, event.ask(draw)), event.tell(draw), event.key)
    if choice < 86:
        story = tell(draw)
        question = draw.one(story.questions)
        return Pair(question.text, question.answer, f"{story.key}/{question.answer}")
    if choice < 94:
        story = tell(draw)
        sentences = story.text.split(". ")
        taken = draw.number(0, len(sentences) - 1)
        near = sentences[max(0, taken - 2) : taken] + sentences[taken + 1 : taken + 3]
        rest = ". ".join(near)
        return Pair(_with_gaps(draw, sentences[taken]), rest, story.key)
    turn = draw.one((chat.arithmetic, chat.counting, chat.introduction, chat.small_talk))(draw)
    return Pair(turn.user, turn.answer, turn.answer)


def _same_words(draw: Draw) -> Pair:
    """Two texts with mostly the same words in another order, some of them never seen before.

    They teach that a word which is rare, whatever it means, is worth more than its neighbours.
    """
    rare = [_made_up(draw) for _ in range(draw.number(1, 3))]
    bag = [*rare, *draw.several(REPEATABLE, draw.number(2, 5))]
    texts = []
    for _ in range(2):
        kept = [word for word in bag if word == rare[0] or not draw.chance(0.3)]
        texts.append(
            " ".join(draw.several([*kept, *draw.several(_COMMON, draw.number(1, 4))], len(kept) + 1))
        )
    return Pair(texts[0], texts[1], f"words/{' '.join(bag)}")


def _made_up(draw: Draw) -> str:
    """A word of letters that follow each other as in English: consonants and vowels in turn, sometimes doubled."""
    syllables = [
        draw.one("bcdfghjklmnprstvwz") + draw.one("aeiou") + draw.one(["", "", "n", "r", "s", "l", "ck", "t"])
        for _ in range(draw.number(1, 3))
    ]
    return "".join(syllables)


def _with_gaps(draw: Draw, text: str) -> str:
    """A text without some of its words, so that no single one decides."""
    if draw.chance(0.5):
        return text
    kept = [word for word in text.split() if not draw.chance(_DROPPED_WORDS)]
    return " ".join(kept) if len(kept) >= 2 else text
