"""The choice of texts that are computed together: a turn for every row, and few lengths in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

WINDOW_BATCHES = 4
"""Batches that are chosen at once, from texts sorted by length: a new row waits for that many at the most."""


class TextPlace(NamedTuple):
    """A text by its row and its index there, with its tokens."""

    row: int
    text: int
    tokens: int


def choose(
    waiting: Iterable[tuple[int, Iterator[tuple[int, int]]]], tokens_max: int
) -> list[list[TextPlace]]:
    """Batches of at most `tokens_max` tokens each, or of one longer text.

    `waiting` are rows with the (index, tokens) of their texts, which are taken in turns.
    """
    window: list[TextPlace] = []
    left = tokens_max * WINDOW_BATCHES
    rows = list(waiting)
    while rows and left > 0:
        going_on = []
        for row, texts in rows:
            found = next(texts, None)
            if found is None or left <= 0:
                continue
            window.append(TextPlace(row, *found))
            left -= found[1]
            going_on.append((row, texts))
        rows = going_on
    return cut(sorted(window, key=lambda place: place.tokens), tokens_max)


def cut(places: Sequence[TextPlace], tokens_max: int) -> list[list[TextPlace]]:
    """Consecutive places with at most `tokens_max` tokens together, at least one."""
    batches: list[list[TextPlace]] = []
    room = 0
    for place in places:
        if not batches or place.tokens > room:
            batches.append([])
            room = tokens_max
        batches[-1].append(place)
        room -= place.tokens
    return batches
