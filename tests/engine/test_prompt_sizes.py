"""Prompts are read in few sizes, and it shows in nothing but time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import Run, finish, greedy, make_engine, probe_once, step
from zmqengine.engine import kv
from zmqengine.engine.autotune.attention import even_columns
from zmqengine.engine.interface import RowRequest, StepResult
from zmqengine.engine.load import prompt_sizes, shapes_warm_up
from zmqengine.engine.models.mlx_lm import KVCache
from zmqengine.engine.prefix_cache.store import PrefixCache
from zmqengine.engine.row import Row
from zmqengine.engine.step.prefill import Prefill

LENGTHS = (1, 2, 5, 15, 16, 17, 18, 60, 65, 66, 130, 255, 257, 258, 300, 520)


def text(length: int, seed: int, shared: int = 0) -> list[int]:
    """Random tokens, of which the first `shared` are those of every other text."""
    common, own = random.Random(1), random.Random(seed)
    return [(common if place < shared else own).randrange(1, 300) for place in range(length)]


class Calls:
    """Calls of `kv.read_alone` and `KVBatch.prefill`: tokens of a row, and those before them."""

    def __init__(self) -> None:
        self.alone: list[tuple[int, int]] = []
        self.together: list[tuple[int, int]] = []

    def read_alone(self, model: Any, caches: Any, tokens: Any, size: int = 0) -> Any:
        self.alone.append((max(len(tokens), size), getattr(caches[0], "offset", 0)))
        return READ_ALONE(model, caches, tokens, size)

    def prefill(self, batch: kv.KVBatch, model: Any, texts: Any, size: int = 0) -> Any:
        self.together.append((max(size, *map(len, texts)), max(batch.lengths)))
        return PREFILL(batch, model, texts, size)

    @contextmanager
    def seen(self) -> Iterator[None]:
        def prefill(*given: Any) -> Any:
            return self.prefill(*given)

        with patch.object(kv, "read_alone", self.read_alone), patch.object(kv.KVBatch, "prefill", prefill):
            yield


READ_ALONE, PREFILL = kv.read_alone, kv.KVBatch.prefill


def test_rows_that_come_and_go_get_the_tokens_they_get_alone(model):
    """Alone and together, at once and in chunks, anew and after what the prompt cache has."""
    draw = random.Random(5)
    prompts = [text(length, length, draw.choice([0, length // 2, length])) for length in (*LENGTHS, 400, 600)]
    engine = make_engine(model, rows_max=6, few_sizes=True, prefill_chunk=256, prefill_chunk_idle=512)
    run, calls, waiting = Run(), Calls(), list(enumerate(prompts))
    draw.shuffle(waiting)
    with calls.seen():
        while not all(map(run.ended, range(len(prompts)))):
            free = engine.rows_max - engine.stats().rows_decoding - engine.stats().rows_prefilling
            count = min(free, draw.choice([0, 1, 3]))
            assert not engine.insert([RowRequest(row, prompt, 8) for row, prompt in waiting[:count]])
            waiting = waiting[count:]
            step(engine, run)
    for row, prompt in enumerate(prompts):
        assert run.ids(row) == greedy(model, prompt, 8)
        assert [done.done for done in run.prefills if done.row == row][-1] == len(prompt)
    assert sum(run.cached(row) for row in range(len(prompts))) > 0
    assert calls.together
    assert {tokens for tokens, _ in calls.alone + calls.together} <= set(prompt_sizes.SIZES)


def test_what_has_no_meaning_leaves_nothing(models):
    """Caches after it are those after the text alone, for one row and for rows of a batch; so is what follows."""
    model = models["llama"]
    texts = [text(length, length) for length in (17, 40, 33)]
    whole = []
    for size in (0, 64):
        alone = kv.new_caches(model)
        kv.read_alone(model, alone, texts[0], size)
        kv.read_alone(model, alone, texts[1], size)
        assert {cache.offset for cache in alone} == {57}
        batch = kv.KVBatch.merge([kv.new_caches(model) for _ in texts], [0] * len(texts))
        batch.prefill(model, texts, size)
        whole.append([cache.keys[..., :57, :] for cache in alone])
        for row in (0, 1):
            extracted = batch.extract(row)
            whole[-1] += [cache.keys for cache in extracted] + [cache.values for cache in extracted]
        inputs = mx.array([[7], [8], [9]], dtype=mx.uint32)
        whole[-1].append(model(inputs, cache=batch.begin_step(inputs)))
        whole[-1].append(model(mx.array([[7]], dtype=mx.uint32), cache=alone))
    for plain, padded in zip(*whole, strict=True):
        np.testing.assert_allclose(np.array(padded), np.array(plain), atol=2e-5)


@pytest.mark.parametrize("shape", ["sliding", "mamba", "hybrid"])
def test_caches_that_cannot_go_back_are_given_nothing_but_the_text(models, shape):
    """A window or a state would keep what has no meaning."""
    engine, calls = make_engine(models[shape], few_sizes=True), Calls()
    with calls.seen():
        engine.insert([RowRequest(0, text(90, 0), 4)])
        run = finish(engine)
    assert [tokens for tokens, _ in calls.alone] == [89]
    assert run.ids(0) == greedy(models[shape], text(90, 0), 4)


def test_nothing_is_read_past_the_context(model):
    """Positions that a model does not have are not asked for."""
    engine, calls = make_engine(model, few_sizes=True, context_tokens=300), Calls()
    with calls.seen():
        engine.insert([RowRequest(0, text(290, 0), 4)])
        run = finish(engine)
    assert max(map(sum, calls.alone)) == 300
    assert run.ids(0) == greedy(model, text(290, 0), 4)


def columns(shape: tuple[int, int]) -> tuple[int, int]:
    """The tokens of a call and its columns, as far as they matter: all of them where cuDNN plans for them."""
    tokens, before = shape
    if tokens >= prompt_sizes.WHOLE and before % prompt_sizes.WHOLE == 0:
        return tokens, tokens + before
    return tokens, even_columns(tokens + before)


def test_few_shapes_are_met_and_all_are_read_before(model):
    """200 prompts of any length, in chunks as they are with and without streams beside them."""
    draw, shapes = random.Random(3), set()

    def read(_: Any, caches: Any, tokens: Any, size: int = 0) -> None:
        shapes.add((size, caches[0].offset))
        for cache in caches:
            if cache.keys is None:
                cache.keys = cache.values = mx.zeros((1, 1, 1, 1))
            cache.offset += len(tokens)

    store = PrefixCache(model, None, 0, {})
    with patch.object(kv, "read_alone", read):
        for number in range(200):
            reading = Prefill(model, store, probe_once(model), prompt_sizes.Sizes(8192))
            row = Row(RowRequest(number, [1] * draw.randrange(1, 8000), 1), 300, 8192)
            reading.add([row])
            chunk = draw.choice([512, 768, 1024, 2048])
            while reading.rows:
                reading.step(chunk, 0, StepResult())
    known = set(prompt_sizes.usual_shapes(8192))
    assert {columns(shape) for shape in shapes} <= {columns(shape) for shape in known}
    assert len(known) < 250
    asked: list[tuple[int, int]] = []
    with patch.object(shapes_warm_up, "_read", lambda model, caches, tokens, plans: record(caches, tokens)):

        def record(caches: Any, tokens: int) -> None:
            asked.append((tokens, caches[0].offset))
            if caches[0].keys is None:
                caches[0].keys = caches[0].values = mx.zeros((1, 1, 8192, 1))
            caches[0].offset += tokens

        with patch.object(kv, "new_caches", lambda model: [KVCache()]):
            shapes_warm_up.read_shapes(model, 8192, float("inf"))
    assert known <= set(asked)


def test_a_long_prompt_is_read_in_the_same_parts_at_any_pace():
    """Each begins at a multiple of itself, also where the pace changes on the way, or where the prompt was found."""
    draw, sizes, parts = random.Random(4), prompt_sizes.Sizes(8192), set()
    for _ in range(300):
        held, length = draw.choice([0, 0, 768, 1280]), draw.randrange(3000, 8000)
        while held < length:
            count = sizes.part(held, length - held, draw.choice([256, 700, 1024, 1500, 2048, 4096]))
            if count < length - held:
                parts.add((count, held % count))
            held += count
    assert parts == {(size, 0) for size in (256, 512, 1024, 2048)}
    assert sizes.part(100, 5000, 1400) == 1024 - 100
    assert (sizes.part(0, 90, 100), sizes.part(0, 200, 100), sizes.part(0, 300, 600)) == (90, 64, 300)


def test_reading_every_shape_ends_when_time_is_up_and_leaves_nothing(model):
    """Whatever is left then is read when it comes."""
    assert shapes_warm_up.read_shapes(model, 64, float("inf")) == 4
    assert shapes_warm_up.read_shapes(model, 64, 0.0) == 0
