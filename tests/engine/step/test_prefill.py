"""Prompts are read in bounded chunks, and nobody waits for ever."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import Run, finish, greedy, make_engine, step
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.step import prefill
from zmqengine.engine.step.prefill import plan_chunk


def read_in(engine) -> int:
    before = engine.stats().prompt_tokens
    engine.next()
    return engine.stats().prompt_tokens - before


def test_a_step_reads_at_most_one_chunk_while_others_decode(model):
    """lmstudio #1709, omlx #2031: a long prompt must not pause every stream; each step also makes tokens."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=256)
    engine.insert([RowRequest(0, [5, 6], 500)])
    run = Run()
    for _ in range(4):
        step(engine, run)
    engine.insert([RowRequest(1, [7] * 1000, 3)])
    for number in range(15):
        before = engine.stats()
        step(engine, run)
        after = engine.stats()
        assert after.prompt_tokens - before.prompt_tokens == 64
        # On a CPU a step beside a chunk reports its own token; the first one also that of the step before.
        assert after.generated_tokens - before.generated_tokens == (1 if number else 2)
    assert [prefill.done for prefill in run.prefills if prefill.row == 1] == [64 * n for n in range(1, 16)]
    step(engine, run)
    assert run.prefills[-1] == (1, 1000, 1000, 0)
    assert finish(engine, run).ids(1) == greedy(model, [7] * 1000, 3)


def test_an_idle_engine_reads_a_larger_but_bounded_chunk(model):
    """Admissions and aborts wait for a step, so it is bounded even when nobody decodes."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=256)
    engine.insert([RowRequest(0, [7] * 1000, 3)])
    assert [read_in(engine) for _ in range(4)] == [256, 256, 256, 231]


def test_the_pace_learns_from_the_steps_that_decode(model, monkeypatch):
    """Not from those that only report the last tokens, or find nothing to do."""
    engine = make_engine(model)
    launched = []
    monkeypatch.setattr(engine._pace, "record", lambda *_, decoded: launched.append(decoded))
    engine.insert([RowRequest(0, [5, 6, 7], 5), RowRequest(1, [8, 9], 5)])
    while engine.stats().rows_decoding or engine.stats().rows_prefilling:
        engine.next()
    engine.next()
    assert launched.count(True) == 5
    assert launched[-1] is False


def test_the_host_waits_for_the_chunk_before_the_last_one(model, monkeypatch):
    """Whatever the number of segments of a chunk: to wait for the last one would leave a GPU idle while the host builds
    the next."""
    waits = []

    class Counted:
        """MLX, whose `eval` is counted."""

        def __getattr__(self, name):
            return getattr(mx, name)

        def eval(self, *arrays):
            waits.append(len(arrays))
            mx.eval(*arrays)

    monkeypatch.setattr(prefill, "mx", Counted())
    engine = make_engine(model, prefill_chunk_idle=128, prefill_chunk=128)
    engine.insert([RowRequest(0, [7] * 900, 3)])
    seen = []
    for row in range(1, 6):
        engine.insert([RowRequest(row, [7 + row] * 30, 30)])
        waits.clear()
        assert len(engine.next().prefills) > 1
        seen.append(len(waits))
    assert seen == [0, 0, 1, 1, 1]


def test_padding_counts_as_reading(model):
    """Rows of one call are padded to the longest; the bound is on the padded size."""
    engine = make_engine(model, prefill_chunk_idle=128, prefill_chunk=128)
    engine.insert([RowRequest(row, [7] * length, 3) for row, length in enumerate((3, 60, 61, 80))])
    result = engine.next()
    assert sorted((prefill.row, prefill.done) for prefill in result.prefills) == [(0, 3), (1, 60)]


def test_short_prompts_pass_a_long_one_and_the_long_one_still_comes_in(model):
    """Sixteen short prompts that keep arriving do not starve the long one, nor wait for it."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=64, prompt_cache_bytes=0)
    engine.insert([RowRequest(100, [7] * 800, 3)])
    run = Run()
    step(engine, run)
    for row in range(60):
        engine.insert([RowRequest(row, [9 + row] * 30, 2)])
        step(engine, run)
        assert run.prefills[-1].row == row or run.prefills[-2].row == row
    assert 100 in run.tokens
    finish(engine, run)
    assert run.ids(100) == greedy(model, [7] * 800, 3)


@given(
    remaining=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=33),
    tokens_max=st.integers(1, 2048),
)
def test_every_plan_is_bounded_and_moves_on(remaining, tokens_max):
    """Whatever waits: never more than the bound, each row once, and something is always read."""
    chunk = plan_chunk(remaining, tokens_max)
    places = chunk.together + [place for place, _ in chunk.slices]
    assert len(set(places)) == len(places) > 0
    padded = len(chunk.together) * max((remaining[place] for place in chunk.together), default=0)
    assert padded + sum(tokens for _, tokens in chunk.slices) <= tokens_max
    assert all(1 <= tokens <= remaining[place] for place, tokens in chunk.slices)


@given(
    arrivals=st.lists(st.lists(st.integers(1, 300), max_size=4), min_size=1, max_size=30),
    long=st.integers(1000, 4000),
    tokens_max=st.integers(16, 256),
)
def test_the_oldest_prompt_always_ends(arrivals, long, tokens_max):
    """The oldest row gets at least a quarter of each chunk, however many shorter ones arrive."""
    waiting = [long]
    steps = 0
    while waiting and waiting[0] > 0 and steps < 10_000:
        steps += 1
        waiting += arrivals[steps % len(arrivals)]
        before = waiting[0]
        chunk = plan_chunk(waiting, tokens_max)
        for place, tokens in chunk.slices:
            waiting[place] -= tokens
        for place in chunk.together:
            waiting[place] = 0
        if waiting[0]:
            assert before - waiting[0] >= max(1, tokens_max // 4)
        waiting = [waiting[0], *(left for left in waiting[1:] if left)]
    assert waiting[0] == 0


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_the_size_of_a_chunk_does_not_change_the_tokens(models, shape, chunk):
    """A prompt cut anywhere is the same prompt."""
    prompts = [[(3 * place + length) % 300 for place in range(length)] for length in (1, 2, 33, 34, 90)]
    engine = make_engine(models[shape], prefill_chunk=chunk, prefill_chunk_idle=chunk, prompt_cache_bytes=0)
    engine.insert([RowRequest(row, prompt, 8) for row, prompt in enumerate(prompts)])
    run = finish(engine)
    assert [run.ids(row) for row in range(5)] == [greedy(models[shape], prompt, 8) for prompt in prompts]
