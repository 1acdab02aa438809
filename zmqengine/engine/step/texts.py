"""Rows of texts: a text is prefilled as a prompt is, and ends with its pooled hidden state.

Texts are batch work of many short prompts. Beside rows that decode `TextPace` gives them a part of a step's time; while
prompts wait they have a quarter of a chunk. A text that does not fit is read in slices, and its row has no other such
text then: the KV cache of the longest one is what the worker reserves for the row.

A device of its own reads a chunk in the packed step: on CUDA whole texts are side by side in one segment, elsewhere
texts of about a length share one, padded. On a CPU the operations of one more segment take longer than a step of a
small model may, so there a chunk beside rows that decode is computed by layers, some in each step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import count

import mlx.core as mx
import numpy as np

from zmqengine.engine import kv
from zmqengine.engine.interface import ModelInfo, RowRequest, StepResult, TextsRequest
from zmqengine.engine.prefix_cache.block import PREFIX_TOKENS_MIN, shared_tokens, whole
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row
from zmqengine.engine.texts.pooling import Pooling
from zmqengine.engine.texts.text_rows import TextPlace, TextRows

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
        # By id of the row of texts: its text of which a part is read, and the pooled state of that.
        self._partial: dict[int, tuple[Row, mx.array | None]] = {}
        self._built: list[tuple[list[Row], mx.array]] = []
        # The arrays of each layer of a chunk that is built and not computed, and the tokens of the chunk.
        self._layers: deque[list[mx.array]] = deque()
        self._layer_tokens = 0
        self._beginnings: OrderedDict[tuple[str, bytes], np.ndarray] = OrderedDict()

    def add(self, request: TextsRequest) -> None:
        """Add a row of texts."""
        self.queue.add(request)

    def remove(self, rows: Iterable[int]) -> None:
        """Drop rows of texts; others are ignored."""
        for row in rows:
            self.rows.pop(row, None)
            partial = self._partial.pop(row, None)
            if partial is not None:
                self._store.prove(partial[0])

    @property
    def partial_rows(self) -> list[Row]:
        """Texts of which a part is read."""
        return [row for row, _ in self._partial.values()]

    def take(self, tokens_max: int) -> list[tuple[Row, int]]:
        """The texts of the next chunk of at most `tokens_max` tokens, padding included, and the tokens of each."""
        slices: list[tuple[Row, int]] = []
        turn = next((id_ for id_, row in self.rows.items() if row.waiting or id_ in self._partial), None)
        if turn in self._partial:
            self.rows.move_to_end(turn)
            row = self._partial[turn][0]
            slices.append((row, min(row.remaining, tokens_max)))
            tokens_max -= slices[0][1]
            if not tokens_max:
                return slices
        branched: set[tuple[str, bytes]] = set()
        for place in self.queue.take(tokens_max, tokens_max, whole=bool(slices)):
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
        if shared >= PREFIX_TOKENS_MIN and shared > max(store.longest(row), store.longest_offered(row)):
            row.branches = [shared]
            branched.add(name)

    def pool(self, rows: list[Row], hidden: mx.array) -> list[mx.array]:
        """Take the hidden states [rows, width, dim] of the next tokens of some texts, before they count as computed.

        Returns the arrays to compute.
        """
        tokens = [min(row.remaining, hidden.shape[1]) for row in rows]
        first, is_last = rows[0], tokens[0] == rows[0].remaining
        of_row = _place(first).row
        known, before = self._partial.get(of_row, (None, None))
        if known is first:
            del self._partial[of_row]
        else:
            before = None
        is_first = first.computed_tokens == first.cached
        pooled = self._pooling.add(before, hidden, tokens, is_first=is_first, is_last=is_last)
        if is_last:
            assert pooled is not None
            vectors = self._pooling.vectors(pooled, [row.prefill_tokens for row in rows])
            self._built.append((rows, vectors))
            return [vectors]
        if of_row in self.rows:
            self._partial[of_row] = first, pooled
        return [] if pooled is None else [pooled]

    @property
    def has_layers(self) -> bool:
        """Whether layers of a chunk are left to compute."""
        return bool(self._layers)

    def defer(self, layers: Sequence[Sequence[mx.array]], pooled: Sequence[mx.array], tokens: int) -> None:
        """Keep a chunk of `tokens` tokens for `compute`: the KV caches of its `layers`, and its `pooled` states."""
        # The caches of a layer are computed from the layer before; behind the last one come pooled states.
        last = [array for layer in layers for array in layer]
        self._layers.extend([*(list(layer) for layer in layers[1:]), [*last, *pooled]])
        self._layer_tokens = tokens

    def compute(self, tokens_max: int) -> int:
        """Compute layers of the chunk with `tokens_max` tokens together, at least one; returns their tokens."""
        count = min(len(self._layers), max(1, tokens_max // self._layer_tokens))
        mx.eval([self._layers.popleft() for _ in range(count)])
        return count * self._layer_tokens

    def start(self) -> None:
        """Start all layers that are left."""
        kv.start(list(self._layers))
        self._layers.clear()

    def landing(self) -> list[tuple[list[Row], mx.array]]:
        """The vectors that are computed or in flight, for `report`."""
        if self._layers:
            return []
        landing, self._built = self._built, []
        return landing

    def report(self, landing: Sequence[tuple[list[Row], mx.array]], result: StepResult) -> None:
        """Wait for vectors and hand them to their rows of texts; beginnings that gave finite ones are valid."""
        for rows, vectors in landing:
            found = np.array(vectors)
            for row, vector in zip(rows, found, strict=True):
                for offer in row.offers:
                    self._store.accept(offer) if np.isfinite(vector).all() else self._store.withdraw(offer)
            self.queue.settle([_place(row) for row in rows], found, result)


def _place(row: Row) -> TextPlace:
    assert row.place is not None, "rows of texts have one"
    return row.place
