"""Documents as batches of rows of like length."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.pico.corpus import Document
from tools.pico.tokens import encode

_LENGTH_STEP = 8


@dataclass(frozen=True)
class Batch:
    """Rows of token ids, shape (rows, length), padded at the end with zeros.

    `places` are the flat indices of the inputs whose next token is learnt, `targets` those next tokens.
    """

    inputs: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]


def batches(
    stream: Iterable[Document],
    tokenizer: Tokenizer,
    tokens_max: int,
    length_max: int,
    pool_documents: int = 1024,
) -> Iterator[Batch]:
    """Batches of at most `tokens_max` inputs, padding included, until `stream` ends.

    Each document is one row, cut at `length_max` tokens; rows are sorted by length within a pool, and the
    batches of a pool come in random, but repeatable, order.
    """
    shuffle = random.Random(0)
    iterator = iter(stream)
    while pool := list(islice(iterator, pool_documents)):
        rows = [encode(tokenizer, document) for document in pool]
        rows = [(ids[: length_max + 1], learnt[: length_max + 1]) for ids, learnt in rows]
        rows.sort(key=lambda row: len(row[0]))
        groups = list(_groups(rows, tokens_max))
        shuffle.shuffle(groups)
        # A long text about which nothing was asked teaches nothing.
        yield from (batch for batch in map(_batch, groups) if len(batch.targets))


Row = tuple[list[int], list[bool]]


def _groups(rows: list[Row], tokens_max: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        if group and (len(group) + 1) * _padded(row) > tokens_max:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _padded(row: Row) -> int:
    inputs = len(row[0]) - 1
    return -(-inputs // _LENGTH_STEP) * _LENGTH_STEP


def _batch(rows: list[Row]) -> Batch:
    length = max(map(_padded, rows))
    ids = np.zeros((len(rows), length + 1), dtype=np.int32)
    learnt = np.zeros((len(rows), length + 1), dtype=np.bool_)
    for index, (row_ids, row_learnt) in enumerate(rows):
        ids[index, : len(row_ids)] = row_ids
        learnt[index, : len(row_ids)] = row_learnt
    targets = np.ascontiguousarray(ids[:, 1:]).reshape(-1)
    places = np.flatnonzero(learnt[:, 1:]).astype(np.int32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), places, targets[places])
