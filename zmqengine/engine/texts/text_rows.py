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
    """A row of texts: waiting texts, and computed vectors behind a gap."""

    __slots__ = ("delivered", "done_tokens", "made", "request", "tokens", "waiting")

    def __init__(self, request: TextsRequest) -> None:
        self.request = request
        self.tokens = sum(map(len, request.texts))
        self.waiting = dict.fromkeys(range(len(request.texts)))
        self.made: dict[int, np.ndarray] = {}
        self.delivered = self.done_tokens = 0

    def take(self, texts: Sequence[int], vectors: np.ndarray) -> np.ndarray | None:
        """The next vectors in order, as far as there is no gap, after those of `texts` were made."""
        if not self.made and list(texts) == list(range(self.delivered, self.delivered + len(texts))):
            self.delivered += len(texts)
            return vectors
        self.made.update(zip(texts, vectors, strict=True))
        ready = []
        while self.delivered in self.made:
            ready.append(self.made.pop(self.delivered))
            self.delivered += 1
        return np.stack(ready) if ready else None


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
        lengths = [place.tokens for place in window]
        if sum(lengths) <= tokens_max and len(window) * max(lengths) <= padded_max:
            return self._taken(window)
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
        return self._taken(ordered[start:stop])

    def _taken(self, places: list[TextPlace]) -> list[TextPlace]:
        for place in places:
            del self.rows[place.row].waiting[place.text]
        return places

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
        by_row: dict[int, tuple[list[int], list[TextPlace]]] = {}
        for index, place in enumerate(places):
            indices, of_row = by_row.setdefault(place.row, ([], []))
            indices.append(index)
            of_row.append(place)
        for id_, (indices, of_row) in by_row.items():
            row = self.rows.get(id_)
            if row is None:
                continue
            if not finite[indices].all():
                del self.rows[id_]
                odd = of_row[int(finite[indices].argmin())].text
                result.failures.append(RowFailure(id_, f"text {odd} gave numbers that are not finite"))
                continue
            row.done_tokens += sum(place.tokens for place in of_row)
            result.prefills.append(RowPrefill(id_, row.done_tokens, row.tokens, 0))
            # All texts of a batch are often one row's.
            made = vectors if len(indices) == len(vectors) else vectors[indices]
            ready = row.take([place.text for place in of_row], shortened(made, row.request.dimensions))
            if ready is not None:
                is_whole = row.delivered == len(row.request.texts)
                result.vectors.append(RowVectors(id_, ready, is_whole))
                if is_whole:
                    del self.rows[id_]


def _places(id_: int, row: TextRow) -> Iterator[TextPlace]:
    texts = row.request.texts
    return (TextPlace(id_, index, len(texts[index])) for index in row.waiting)


def shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first floats of each embedding, of length 1 again."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    cut = vectors[:, :dimensions]
    lengths: np.ndarray = np.linalg.norm(cut, axis=1, keepdims=True)
    short: np.ndarray = cut / np.maximum(lengths, np.float32(1e-12))
    return short
