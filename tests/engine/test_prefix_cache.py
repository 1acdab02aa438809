"""A shared beginning is computed once, and reuse never changes a token."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from tests.support.engines import Run, finish, greedy, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine import kv
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.prefix_cache import PREFIX_TOKENS_MIN, PrefixCache

COUNT = 8


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def generate(engine, prompt: list[int], row: int = 0) -> tuple[list[int], int]:
    """The output, and how many tokens came from the prompt cache."""
    assert engine.insert([RowRequest(row, prompt, COUNT)]) == []
    run = finish(engine)
    return run.ids(row), run.cached(row)


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended(models, shape):
    """Prompt and answer are both reused; the cached count says how much."""
    model = models[shape]
    engine = make_engine(model)
    prompt = tokens(50)
    answer, cached = generate(engine, prompt)
    assert cached == 0
    longer = prompt + answer + tokens(10, 1)
    again, cached = generate(engine, longer)
    # The last token of an answer is never fed to the model.
    assert cached == 50 + COUNT - 1
    assert again == greedy(model, longer, COUNT)
    assert engine.stats().cached_tokens == cached


@pytest.mark.parametrize("shape", ["llama", "sliding"])
def test_a_prompt_seen_before_keeps_one_token_out(models, shape):
    """mlx-lm: an exact hit would leave an empty prompt."""
    model = models[shape]
    engine = make_engine(model)
    prompt = tokens(20)
    first, _ = generate(engine, prompt)
    second, cached = generate(engine, prompt)
    assert (second, cached) == (first, 19)


def test_a_prompt_that_turns_off_early_shares_just_the_beginning(model):
    """The caches of a longer text are cut to what is shared."""
    engine = make_engine(model)
    shared = tokens(40)
    generate(engine, shared + tokens(30, 1))
    prompt = shared + tokens(20, 2)
    output, cached = generate(engine, prompt)
    assert (output, cached) == (greedy(model, prompt, COUNT), 40)


def test_a_shared_prompt_is_reused_while_its_first_reader_still_decodes(model):
    """Caches are kept at the end of a prefill, not only at the end of a row."""
    engine = make_engine(model)
    shared = tokens(100)
    engine.insert([RowRequest(0, [*shared, 1], 100)])
    run = Run()
    for _ in range(3):
        step(engine, run)
    engine.insert([RowRequest(row, shared + tokens(5, row), COUNT) for row in (1, 2, 3)])
    finish(engine, run)
    assert [run.cached(row) for row in (1, 2, 3)] == [100] * 3
    for row in (1, 2, 3):
        assert run.ids(row) == greedy(model, shared + tokens(5, row), COUNT)


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
def test_requests_that_arrive_together_read_what_they_share_once(models, shape):
    """Eight answers to one prompt of 600 tokens, at the same time, while another row decodes."""
    engine = make_engine(models[shape], prefill_chunk=128)
    run = Run()
    engine.insert([RowRequest(100, [5], 60)])
    step(engine, run)
    shared = tokens(600)
    prompts = [shared + tokens(3, row) for row in range(1, 9)]
    engine.insert([RowRequest(row, prompt, COUNT) for row, prompt in enumerate(prompts)])
    finish(engine, run)
    assert [run.ids(row) for row in range(8)] == [greedy(models[shape], prompt, COUNT) for prompt in prompts]
    if shape == "llama":
        assert engine.stats().prompt_tokens <= 602 + 7 * 3
        assert [run.cached(row) for row in range(1, 8)] == [600] * 7


def test_a_row_whose_leader_is_removed_reads_for_itself(model):
    """Nobody waits for a row that is gone, and what it had read is used."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=64)
    prompt = tokens(400)
    engine.insert([RowRequest(0, prompt, COUNT), RowRequest(1, [*prompt, 1], COUNT)])
    run = Run()
    step(engine, run)
    engine.remove([0])
    finish(engine, run)
    assert run.ids(1) == greedy(model, [*prompt, 1], COUNT)
    assert run.cached(1) == 64


def test_an_aborted_row_leaves_what_it_read(model):
    """A client that stops at a stop string comes back with the same conversation."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=64)
    prompt = tokens(100)
    engine.insert([RowRequest(0, prompt, COUNT)])
    engine.next()
    engine.remove([0])
    output, cached = generate(engine, prompt, row=1)
    assert (output, cached) == (greedy(model, prompt, COUNT), 64)


def test_the_caches_of_one_row_are_not_changed_by_another(model):
    """Two rows that go on from one entry, at once and one after the other, do not see each other."""
    engine = make_engine(model)
    shared = tokens(60)
    generate(engine, shared)
    prompts = [shared + tokens(3, row) for row in range(1, 5)]
    engine.insert([RowRequest(row, prompt, COUNT) for row, prompt in enumerate(prompts)])
    run = finish(engine)
    assert [run.ids(row) for row in range(4)] == [greedy(model, prompt, COUNT) for prompt in prompts]
    assert generate(engine, prompts[0])[0] == run.ids(0)


def test_the_budget_holds_and_zero_turns_it_off(model):
    """vllm-mlx, measured at 5.5 GB for a 100 MB model: our budget is kept, and stats tell it."""
    engine = make_engine(model, prompt_cache_bytes=100_000)
    for seed in range(12):
        generate(engine, tokens(60, seed))
        assert engine.memory().prompt_cache <= 100_000
    assert engine.stats().prompt_cache_entries > 1
    assert generate(engine, tokens(60, 11))[1] == 59
    assert generate(engine, tokens(60, 0))[1] == 0
    freed = engine.limit_prompt_cache(0)
    assert freed > 0
    assert engine.memory().prompt_cache == engine.stats().prompt_cache_entries == 0
    off = make_engine(model, prompt_cache_bytes=0)
    for _ in range(2):
        assert generate(off, tokens(60))[1] == 0


def test_reset_forgets_all(model):
    """What an engine held when it failed is not trusted."""
    engine = make_engine(model)
    generate(engine, tokens(60))
    engine.reset()
    assert generate(engine, tokens(60))[1] == 0


def test_kept_caches_hold_nothing_lazy(model):
    """omlx #1437, #1423: they are evaluated on the engine's thread, so another thread may read their bytes."""
    engine = make_engine(model)
    engine.insert([RowRequest(row, tokens(30 + row, row), COUNT) for row in range(3)])
    run = Run()
    for _ in range(4):
        step(engine, run)
    engine.remove([1])
    finish(engine, run)
    kept = [kv.arrays(each.caches) for each in engine._prefix_cache._entries]
    assert len(kept) == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: [np.array(array).size > 0 for arrays in kept for array in arrays]).result()


def entry(length: int) -> list[KVCache]:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, length, 4)), mx.ones((1, 1, length, 4)))
    return [cache]


def test_a_longer_entry_replaces_those_it_covers():
    """Turns of one conversation take the room of the last one only."""
    cache = PrefixCache(1 << 20)
    text = tokens(100)
    for length in (20, 50, 100):
        assert cache.wants(text[:length])
        cache.store(text[:length], entry(length))
    assert len(cache) == 1
    assert not cache.wants(text[:70])
    found = cache.fetch(text[:70])
    assert found is not None
    assert (found[0], found[1][0].offset) == (69, 69)


def test_the_least_recently_used_entry_goes_first():
    """What was fetched lately stays."""
    size = kv.byte_count(entry(40))
    cache = PrefixCache(3 * size)
    texts = [tokens(40, seed) for seed in range(4)]
    for text in texts[:3]:
        cache.store(text, entry(40))
    assert cache.fetch([*texts[0], 1]) is not None
    cache.store(texts[3], entry(40))
    assert [cache.fetch([*text, 1]) is not None for text in texts] == [True, False, True, True]
    assert cache.bytes == 3 * size


def test_what_is_too_short_or_too_large_is_not_kept():
    """A few shared tokens are not worth a copy; one entry may not be over the budget."""
    cache = PrefixCache(100)
    assert not cache.wants(tokens(PREFIX_TOKENS_MIN - 1))
    cache.store(tokens(40), entry(40))
    assert (len(cache), cache.bytes) == (0, 0)
    assert cache.fetch([1]) is None
