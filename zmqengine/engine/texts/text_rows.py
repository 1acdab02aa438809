"""Rows of texts: the choice of texts that are computed together, and vectors handed over in the order of the texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from zmqengine.engine.interface import RowFailure, RowPrefill, RowVectors, StepResult, TextsRequest

WINDOW_BATCHES = 4
"""A batch is chosen by length among the texts of as many batches."""


class TextPlace(NamedTuple):
    """A text by its row and its index there, with its tokens."""

    row: int
    text: int
    tokens: int


class TextRow:
    """A row of texts: those that no batch has taken, and vectors whose turn to be handed over has not come."""

    __slots__ = ("delivered", "done_tokens", "made", "request", "tokens", "waiting")

    def __init__(self, request: TextsRequest) -> None:
        self.request = request
        self.tokens = sum(map(len, request.texts))
        self.waiting = dict.fromkeys(range(len(request.texts)))
        self.made: dict[int, np.ndarray] = {}
        self.delivered = self.done_tokens = 0

    def take(self) -> list[np.ndarray]:
        """The next vectors in order, as far as there is no gap."""
        ready = []
        while self.delivered in self.made:
            ready.append(self.made.pop(self.delivered))
            self.delivered += 1
        return ready


class TextRows:
    """Rows of texts by id. `rows` are in the order of their turns, the next one first."""

    def __init__(self) -> None:
        self.rows: OrderedDict[int, TextRow] = OrderedDict()

    def add(self, request: TextsRequest) -> None:
        self.rows[request.row] = TextRow(request)

    def text(self, place: TextPlace) -> Sequence[int]:
        return self.rows[place.row].request.texts[place.text]

    def take(self, tokens_max: int, padded_max: int, *, whole: bool = False) -> list[TextPlace]:
        """The next batch: the text whose turn it is, and others of about its length.

        They have at most `tokens_max` tokens, and padded to one length at most `padded_max`. A longer text is a batch
        alone, unless only `whole` ones are wanted.
        """
        window = list(self._window(tokens_max * WINDOW_BATCHES))
        if not window or (whole and window[0].tokens > tokens_max):
            return []
        first = window[0]
        self.rows.move_to_end(first.row)
        ordered = sorted(window, key=lambda place: place.tokens)
        start = stop = ordered.index(first)
        stop += 1
        left = tokens_max - first.tokens
        while (
            stop < len(ordered)
            and ordered[stop].tokens <= left
            and (stop - start + 1) * ordered[stop].tokens <= padded_max
        ):
            left -= ordered[stop].tokens
            stop += 1
        while (
            start > 0
            and ordered[start - 1].tokens <= left
            and (stop - start + 1) * ordered[stop - 1].tokens <= padded_max
        ):
            start -= 1
            left -= ordered[start].tokens
        for place in ordered[start:stop]:
            del self.rows[place.row].waiting[place.text]
        return ordered[start:stop]

    def _window(self, tokens: int) -> Iterator[TextPlace]:
        """Texts of about as many `tokens`, one of each row in turn."""
        places = [_places(id_, row) for id_, row in self.rows.items() if row.waiting]
        for turn in zip_longest(*places):
            for place in turn:
                if place is None:
                    continue
                yield place
                tokens -= place.tokens
                if tokens <= 0:
                    return

    def settle(self, places: Iterable[TextPlace], vectors: np.ndarray, result: StepResult) -> None:
        """Hand each vector to its row, and every row's next vectors in order to `result`.

        A row with a vector that is not finite fails. Vectors of rows that have left are dropped.
        """
        finite = np.isfinite(vectors).all(axis=1)
        touched: dict[int, TextRow] = {}
        for place, vector, is_finite in zip(places, vectors, finite, strict=True):
            row = self.rows.get(place.row)
            if row is None:
                continue
            if not is_finite:
                del self.rows[place.row]
                touched.pop(place.row, None)
                result.failures.append(
                    RowFailure(place.row, f"text {place.text} gave numbers that are not finite")
                )
                continue
            row.made[place.text] = shortened(vector, row.request.dimensions)
            row.done_tokens += place.tokens
            touched[place.row] = row
        for id_, row in touched.items():
            result.prefills.append(RowPrefill(id_, row.done_tokens, row.tokens, 0))
            ready = row.take()
            if ready:
                is_whole = row.delivered == len(row.request.texts)
                result.vectors.append(RowVectors(id_, np.stack(ready), is_whole))
                if is_whole:
                    del self.rows[id_]


def _places(id_: int, row: TextRow) -> Iterator[TextPlace]:
    texts = row.request.texts
    return (TextPlace(id_, index, len(texts[index])) for index in row.waiting)


def shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first floats of an embedding, of length 1 again."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    return cut / max(float(np.linalg.norm(cut)), 1e-12)
