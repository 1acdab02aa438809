"""Vectors of a fake engine: of each text by its tokens alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zmqengine.engine.interface import RowPrefill, RowVectors, StepResult, TextsRequest

if TYPE_CHECKING:
    import numpy as np


def fake_vector(text: Sequence[int], width: int, *, second: int = 0, is_score: bool = False) -> np.ndarray:
    """Floats from -1 to 1 that follow from the tokens and where the second text begins; of length 1 unless scores."""
    # A fake engine that makes no vectors starts without.
    import numpy as np

    seed = array("Q", [second, is_score, *text]).tobytes()
    vector = np.frombuffer(hashlib.shake_128(seed).digest(4 * width), "<u4").astype(np.float64) / 2**31 - 1
    return (vector if is_score else _of_length_one(vector)).astype(np.float32)


class FakeTexts:
    """The rows of texts of a fake engine, and how far each has come."""

    def __init__(self, dimensions: int, labels: int) -> None:
        self._dimensions = dimensions
        self._labels = labels
        self.rows: dict[int, TextsRequest] = {}
        self.tokens = 0
        """Tokens of the texts whose vectors were made."""
        self._made: dict[int, int] = {}

    def add(self, request: TextsRequest) -> None:
        self.rows[request.row] = request
        self._made[request.row] = 0

    def remove(self, row: int) -> None:
        """Drop a row, if it is there."""
        self.rows.pop(row, None)
        self._made.pop(row, None)

    def clear(self) -> None:
        """Drop every row."""
        self.rows.clear()
        self._made.clear()

    def step(self, tokens_max: int, result: StepResult) -> None:
        """Make the vectors of the next texts, row by row, while they have at most `tokens_max` tokens; at least one."""
        left = tokens_max
        for row, request in list(self.rows.items()):
            first, lengths = self._made[row], [len(text) for text in request.texts]
            last = first
            while last < len(lengths) and (lengths[last] <= left or left == tokens_max):
                left -= lengths[last]
                last += 1
            if last == first:
                return
            self._made[row] = last
            self.tokens += sum(lengths[first:last])
            vectors = _stacked([self._vector(request, index) for index in range(first, last)])
            result.prefills.append(RowPrefill(row, sum(lengths[:last]), sum(lengths), 0))
            result.vectors.append(RowVectors(row, vectors, last == len(lengths)))
            if last == len(lengths):
                self.remove(row)

    def _vector(self, request: TextsRequest, index: int) -> np.ndarray:
        is_score = request.output == "score"
        second = request.second[index] if request.second else 0
        width = self._labels if is_score else self._dimensions
        vector = fake_vector(request.texts[index], width, second=second, is_score=is_score)
        return vector if request.dimensions is None else _of_length_one(vector[: request.dimensions])


def _stacked(vectors: Sequence[np.ndarray]) -> np.ndarray:
    import numpy as np

    return np.stack(vectors)


def _of_length_one(vector: np.ndarray) -> np.ndarray:
    import numpy as np

    whole: np.ndarray = vector / np.linalg.norm(vector)
    return whole
