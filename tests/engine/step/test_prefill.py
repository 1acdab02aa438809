"""Prompts are read in bounded chunks, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from tests.support.engines import Run, finish, greedy, make_engine, runner_of, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowPrefill, RowRequest


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
    for _ in range(15):
        before = engine.stats()
        step(engine, run)
        after = engine.stats()
        assert after.prompt_tokens - before.prompt_tokens == 64
        assert after.generated_tokens - before.generated_tokens == 1
    assert [prefill.done for prefill in run.prefills if prefill.row == 1] == [64 * n for n in range(1, 16)]
    step(engine, run)
    assert run.prefills[-1] == RowPrefill(1, 1000, 1000, 0)
    assert finish(engine, run).ids(1) == greedy(model, [7] * 1000, 3)


def test_an_idle_engine_reads_a_larger_but_bounded_chunk(model):
    """Admissions and aborts wait for a step, so it is bounded even when nobody decodes."""
    engine = make_engine(model, prefill_chunk=64, prefill_chunk_idle=256)
    engine.insert([RowRequest(0, [7] * 1000, 3)])
    assert [read_in(engine) for _ in range(4)] == [256, 256, 256, 231]


def test_prompts_of_unlike_lengths_share_a_step(model):
    """Without padding: the bound is on their tokens."""
    engine = make_engine(model, prefill_chunk_idle=145, prefill_chunk=145)
    engine.insert([RowRequest(row, [7 + row] * length, 3) for row, length in enumerate((60, 3, 80, 61))])
    result = engine.next()
    assert sorted((prefill.row, prefill.done) for prefill in result.prefills) == [(0, 60), (1, 3), (3, 61)]
    assert [token.row for token in result.tokens] == [0, 1, 3]
    result = engine.next()
    assert [(prefill.row, prefill.done) for prefill in result.prefills] == [(2, 80)]
    assert sorted(token.row for token in result.tokens) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", ["mamba", "sliding"])
def test_pieces_for_code_of_mlx_lm_have_few_lengths(models, shape, monkeypatch):
    """MLX #3964: functions under `mx.compile` keep a trace of each shape. Prompts of all lengths, also beside a row in
    decode and behind a cached prefix, make the tokens that they would have made."""
    runner = runner_of(models[shape], "mlx-lm")
    engine = make_engine(runner, prefill_chunk=100, prefill_chunk_idle=200)
    call, lengths = runner._call, []
    monkeypatch.setattr(
        engine._runner, "_call", lambda piece, *rest: lengths.append(piece.count) or call(piece, *rest)
    )
    draw = random.Random(1)
    prompts = [[draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randrange(2, 250))] for _ in range(9)]
    prompts += [[*prompt[: len(prompt) // 2], 7, 8, 9] for prompt in prompts]
    for number, prompt in enumerate(prompts):
        assert engine.insert([RowRequest(number, prompt, 3)]) == []
        if number % 3 == 2:
            run = finish(engine)
            assert run.ids(number) == greedy(models[shape], prompt, 3)
    finish(engine)
    assert all(length < 64 or length % 64 == 0 for length in lengths)
    assert max(lengths) == 192


def test_the_pace_learns_from_the_steps_that_decode(model, monkeypatch):
    """Not from those that only report the last tokens, or find nothing to do."""
    engine = make_engine(model)
    launched = []
    monkeypatch.setattr(engine._pace, "record", lambda *_, decoded: launched.append(decoded))
    engine.insert([RowRequest(0, [5, 6, 7], 5), RowRequest(1, [8, 9], 5)])
    while engine.stats().rows_decoding or engine.stats().rows_prefilling:
        engine.next()
    engine.next()
    # The first of five tokens follows from the prompt.
    assert launched.count(True) == 4
    assert launched[-1] is False


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


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_the_size_of_a_chunk_does_not_change_the_tokens(models, shape, chunk):
    """A prompt cut anywhere is the same prompt."""
    prompts = [[(3 * place + length) % 300 for place in range(length)] for length in (1, 2, 33, 34, 90)]
    engine = make_engine(models[shape], prefill_chunk=chunk, prefill_chunk_idle=chunk, prompt_cache_bytes=0)
    engine.insert([RowRequest(row, prompt, 8) for row, prompt in enumerate(prompts)])
    run = finish(engine)
    assert [run.ids(row) for row in range(5)] == [greedy(models[shape], prompt, 8) for prompt in prompts]
