"""Caches of a batch whose rows go back by unlike numbers hold, for each row, just its own tokens in order."""

from __future__ import annotations

import os
import random

import mlx.core as mx
import numpy as np
import pytest

from tests.support.kv_kernels import MemoryKernels, write_in_place
from zmqengine.engine import kv
from zmqengine.engine.kv import kv_batch
from zmqengine.engine.models.mlx_lm import KVCache

OPERATIONS = int(os.environ.get("ZMQENGINE_TEST_CACHE_OPERATIONS", "1000"))
LAYERS, HEADS, WIDTH = 2, 1, 32


class Batch:
    """Rows as lists of numbers, and caches that should hold the same: each number is the key of its token."""

    def __init__(self, kernels: kv.KVKernels = kv.PLAIN) -> None:
        self.rows: list[list[float]] = []
        self.kernels = kernels
        # Copies for the prefix cache that are computed later, and the keys they should have.
        self.copies: list[tuple[mx.array, list[float]]] = []
        self.kv = kv.KVBatch()
        self.next = 1.0

    def fresh(self, count: int) -> list[float]:
        self.next += count
        return [self.next - count + place for place in range(count)]

    def join(self, lengths: list[int]) -> None:
        texts = [self.fresh(length) for length in lengths]
        self.kv.join(
            kv.KVBatch.merge([[single(text) for _ in range(LAYERS)] for text in texts], lengths, self.kernels)
        )
        self.rows += texts

    def read(self, width: int, accepted: list[int]) -> None:
        """A window of `width`, of which each row keeps what it has accepted."""
        texts = self.write(width, self.rows)
        self.keep(texts, accepted)
        self.kv.roll_back([width - count for count in accepted])

    def write(self, width: int, before: list[list[float]]) -> list[list[float]]:
        """A window that is to see `before` it."""
        texts = [self.fresh(width) for _ in self.rows]
        keys = mx.array(texts)[:, None, :, None] * mx.ones((1, HEADS, 1, WIDTH))
        caches = self.kv.begin_step(mx.array(texts))
        mask, spans = caches[0].make_mask(width), caches[0].spans(width)
        marks = None if spans is None or spans.hidden is None else np.array(spans.hidden)[:, None, None]
        for cache in caches:
            seen, _ = cache.update_and_fetch(keys, -keys)
        self.kv.launch(seen)
        if mask is None:
            mask = mx.ones((len(self.rows), 1, width, seen.shape[2]), dtype=mx.bool_)
        for said in [mask] if spans is None else [mask, spans.as_mask()]:
            self.check_mask(np.array(said), np.array(seen)[:, 0, :, 0], before, texts)
        if marks is not None:
            # What a kernel is told instead of a mask.
            columns = np.arange(seen.shape[2])
            shown = (columns >= np.array(spans.starts)[:, None, None, None]) & (
                marks[..., : len(columns)] == 0
            )
            until = spans.columns - width + 1 + np.arange(width)
            shown = shown & (columns < until[:, None])
            self.check_mask(shown, np.array(seen)[:, 0, :, 0], before, texts)
        return texts

    def keep(self, texts: list[list[float]], accepted: list[int]) -> None:
        for row, text, count in zip(self.rows, texts, accepted, strict=True):
            row.extend(text[:count])

    def check_mask(
        self, mask: np.ndarray, seen: np.ndarray, before: list[list[float]], texts: list[list[float]]
    ) -> None:
        """Each place of the window sees the row's tokens and the window up to itself, once and in order."""
        for place, (row, text) in enumerate(zip(before, texts, strict=True)):
            for ahead in range(len(text)):
                assert seen[place][mask[place, 0, ahead]].tolist() == row + text[: ahead + 1]

    def leave(self, places: list[int]) -> None:
        layout = kv.BlockLayout([single([1.0])] * LAYERS)
        for place, source in self.kv.leaving(sorted(places)).items():
            (keys,) = layout.take(source, 0, [len(self.rows[place])])[0]
            self.copies.append((keys, self.rows[place]))
        staying = [place for place in range(len(self.rows)) if place not in places]
        self.rows = [self.rows[place] for place in self.kv.keep_rows(staying)]

    def check(self) -> None:
        for place, row in enumerate(self.rows):
            wanted = max(1, len(row) - 2)
            for caches, text in (
                (self.kv.extract(place), row),
                (self.kv.extract(place, wanted), row[:wanted]),
            ):
                for cache in caches:
                    assert cache.offset == len(text)
                    assert np.array(cache.keys)[0, 0, :, 0].tolist() == text
                    assert np.array(cache.values)[0, 0, :, 0].tolist() == [-number for number in text]
        for keys, text in self.copies:
            assert np.array(keys)[0, 0, 0, :, 0].tolist() == text
        self.copies = []
        assert self.kv.lengths == list(map(len, self.rows))
        for cache in self.kv.caches:
            assert cache.offset.tolist() == self.kv.lengths


def single(text: list[float]) -> KVCache:
    cache = KVCache()
    keys = mx.array(text)[None, None, :, None] * mx.ones((1, HEADS, 1, WIDTH))
    cache.update_and_fetch(keys, -keys)
    return cache


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_random_operations_agree_with_a_plain_replay(monkeypatch, seed, in_place):
    """Rows join, leave and are copied, verify blocks of any width keep any number of tokens, gaps come and go.

    Once MLX copies the arrays, once rows stay, move and are written in place.
    """
    draw = random.Random(seed)
    kernels = MemoryKernels(gpu=True)
    batch = Batch(kernels if in_place else kv.PLAIN)
    if in_place:
        monkeypatch.setattr(kv_batch, "_UNUSED_SHARE_MAX", 0.8)
        write_in_place(monkeypatch)
    gaps = 0
    for _ in range(OPERATIONS // 2):
        kind = draw.random()
        if not batch.rows or (kind < 0.06 and len(batch.rows) < 6):
            batch.join([draw.choice((1, 3, 30, 250)) for _ in range(draw.randrange(1, 3))])
        elif kind < 0.12:
            batch.leave(draw.sample(range(len(batch.rows)), draw.randrange(1, len(batch.rows) + 1)))
        else:
            width = draw.choice((1, 2, 5, 9))
            batch.read(width, [draw.randrange(width + 1) for _ in batch.rows])
            gaps += batch.kv.layout.gaps is not None
        if batch.rows and draw.random() < 0.2:
            batch.check()
    assert gaps > OPERATIONS / 20
    assert not in_place or min(kernels.moves.count("within"), kernels.moves.count("into")) > 0


def test_going_back_copies_nothing():
    """The arrays are the same objects, and the columns that all rows give up are used again."""
    batch = Batch()
    batch.join([5, 9])
    batch.read(1, [1, 1])
    before = [cache.keys for cache in batch.kv.caches], batch.kv.layout.columns
    batch.kv.roll_back([1, 1])
    assert all(cache.keys is keys for cache, keys in zip(batch.kv.caches, before[0], strict=True))
    assert batch.kv.layout.columns == before[1] - 1
    assert batch.kv.layout.gaps is None


def test_gaps_are_closed_before_the_caches_grow():
    """A batch whose rows accept little does not get longer than its longest row and a step of growth."""
    batch = Batch()
    batch.join([20, 10])
    draw = random.Random(5)
    for _ in range(120):
        batch.read(9, [draw.randrange(1, 4) for _ in batch.rows])
        assert batch.kv.caches[0].keys.shape[2] <= max(map(len, batch.rows)) + 256
    batch.check()
