"""Rows of texts: a text is computed as a prompt is, and ends with its pooled hidden state.

Texts are batch work of many short prompts: beside other rows they have a quarter of the step's tokens. A text that does
not fit is read in slices, and its row has no other such text then: the KV cache of the longest one is what the worker
reserves for the row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

import mlx.core as mx
import numpy as np

from zmqengine.engine.interface import ModelInfo, RowRequest, StepResult, TextsRequest
from zmqengine.engine.prefix_cache.block import PREFIX_TOKENS_MIN, shared_tokens, whole
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row
from zmqengine.engine.texts.pooling import Pooling
from zmqengine.engine.texts.text_rows import TextPlace, TextRows

# Texts of a step are not padded to one length.
_PADDED_MAX = 1 << 60
_BEGINNINGS_MAX = 256
"""Beginnings of recent texts that are remembered; each is one text."""


class Texts:
    """The texts of an engine, and their vectors in flight.

    A beginning that a text shares with an earlier one goes into the prefix cache, and nothing else of texts does: a
    flood of them would drive out prompts. Where every token is pooled no beginning is reused.
    """

    def __init__(self, info: ModelInfo, pooling: Pooling, store: PrefixCache) -> None:
        self.queue = TextRows()
        self.rows = self.queue.rows
        self._info = info
        self._pooling = pooling
        self._store = store
        self._row_ids = count(-2, -1)
        # Texts of which a part is read, and the pooled state of that; the one whose turn it is comes first.
        self._partial: dict[Row, mx.array | None] = {}
        self._beginnings: OrderedDict[tuple[str, bytes], np.ndarray] = OrderedDict()

    def add(self, request: TextsRequest) -> None:
        """Add a row of texts."""
        self.queue.add(request)

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows of texts; others are ignored."""
        ids = set(rows)
        for id_ in ids:
            self.rows.pop(id_, None)
        for text in [text for text in self._partial if _place(text).row in ids]:
            del self._partial[text]
            self._store.prove(text)
            text.gone = True
            self.close(text)

    @property
    def partial_rows(self) -> list[Row]:
        """Texts of which a part is read."""
        return list(self._partial)

    def take(self, tokens_max: int) -> list[tuple[Row, int]]:
        """The texts of the next step, and the tokens of each, at most `tokens_max` together."""
        slices: list[tuple[Row, int]] = []
        for text in self._partial:
            slices.append((text, min(text.remaining, tokens_max)))
            tokens_max -= slices[-1][1]
            if not tokens_max:
                return slices
        branched: set[tuple[str, bytes]] = set()
        for place in self.queue.take(tokens_max, _PADDED_MAX, whole=bool(slices)):
            row = self._row(place)
            if self._pooling.kind == "last":
                self._branch(row, branched)
            slices.append((row, min(row.remaining, tokens_max)))
        return slices

    def _row(self, place: TextPlace) -> Row:
        request = self.rows[place.row].request
        text = RowRequest(
            next(self._row_ids), self.queue.text(place), max_tokens=1, cache_scope=request.cache_scope
        )
        row = Row(text, self._info.vocab_size, self._info.context_tokens, place=place)
        row.reuses_prefix = self._pooling.kind == "last"
        return row

    def _branch(self, row: Row, branched: set[tuple[str, bytes]]) -> None:
        """Let a row keep the beginning that it shares with an earlier text, unless another one of its chunk does."""
        name = row.scope, row.ids[:PREFIX_TOKENS_MIN].tobytes()
        before, self._beginnings[name] = self._beginnings.get(name), row.ids
        self._beginnings.move_to_end(name)
        if len(self._beginnings) > _BEGINNINGS_MAX:
            self._beginnings.popitem(last=False)
        store = self._store
        if before is None or name in branched or not store.may_keep(row):
            return
        shared = shared_tokens(before, row.ids[:-1])
        shared = whole(shared) if store.keeps_states else shared
        prefix = store.prefix(row)
        if shared >= PREFIX_TOKENS_MIN and shared > max(prefix.cached, prefix.offered):
            row.branches = [shared]
            branched.add(name)

    def pool(self, row: Row, hidden: mx.array) -> tuple[list[Row], mx.array] | None:
        """Take the hidden states [tokens, dim] of the next tokens of a text, before they count as computed.

        Returns the text and its vector [1, floats] once all are taken.
        """
        tokens = hidden.shape[0]
        is_last = tokens == row.remaining
        before = self._partial.pop(row, None)
        is_first = row.computed_tokens == row.cached
        pooled = self._pooling.add(before, hidden[None], [tokens], is_first=is_first, is_last=is_last)
        if is_last:
            assert pooled is not None
            return [row], self._pooling.vectors(pooled, [row.prefill_tokens])
        if _place(row).row in self.rows:
            self._partial[row] = pooled
        return None

    def unread(self) -> list[mx.array]:
        """Pooled states of texts of which a part is read."""
        return [pooled for pooled in self._partial.values() if pooled is not None]

    def report(self, landing: Sequence[tuple[list[Row], mx.array]], result: StepResult) -> None:
        """Wait for vectors and hand them to their rows of texts; beginnings that gave finite ones are valid."""
        if not landing:
            return
        vectors = np.concatenate([np.array(made) for _, made in landing])
        rows = [row for texts, _ in landing for row in texts]
        for row, vector in zip(rows, vectors, strict=True):
            row.is_finite = bool(np.isfinite(vector).all())
            for offer in row.offers:
                self._store.accept(offer) if row.is_finite else self._store.withdraw(offer)
            self.close(row)
        self.queue.settle([_place(row) for row in rows], vectors, result)

    @staticmethod
    def close(row: Row) -> None:
        """Free the cache of a text."""
        if row.cache is not None:
            row.cache.close(is_finite=row.is_finite)
            row.cache = None


def _place(row: Row) -> TextPlace:
    assert row.place is not None, "rows of texts have one"
    return row.place
