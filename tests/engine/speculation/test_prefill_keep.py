"""Prompts that are read in part: a draft model chooses tokens, and the model reads these at their own positions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.drafts import Self, speculator
from tests.support.engines import Run, finish, make_engine, runner_of, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.importance import CHUNK_TOKENS, LOOK_AHEAD, kept_tokens

PROMPT = [random.Random(7).randrange(VOCAB_SIZE // 2) for _ in range(500)]
TOKENS = 12


class Choosing(Self):
    """Keeps what it chose, and has the engine wait some steps for each prompt."""

    def __init__(self, model: Any, waits: int = 0) -> None:
        super().__init__(model)
        self.chosen: dict[int, np.ndarray] = {}
        self.waits = waits
        self.waited = 0

    def choose(self, row: Row, seconds_max: float, clock: Callable[[], float]) -> np.ndarray | None:
        self.waited += 1
        if self.waited % (self.waits + 1):
            return None
        kept = super().choose(row, seconds_max, clock)
        assert kept is not None
        self.chosen[row.id] = kept
        return kept


def engine_of(model: Any, source: DraftModel | None = None, **options: Any) -> Any:
    return make_engine(model, speculator=speculator(source or Self(model)), **options)


def alone(model: Any, request: RowRequest) -> list[int]:
    engine = engine_of(model)
    assert engine.insert([request]) == []
    run = finish(engine)
    assert run.failures == []
    return run.ids(request.row)


# --- a direct reference: mlx-lm's layers, all tokens, attention of every head in the open ---


def read(model: Any, tokens: list[int], seen: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits of the last token, and shares [heads, tokens, tokens] of each layer, where `seen` columns alone count."""
    hidden = model.model.embed_tokens(mx.array([tokens]))
    count = len(tokens)
    allowed = np.tril(np.ones((count, count), bool)) & (seen[None] | np.eye(count, dtype=bool))
    every = []
    for layer in model.model.layers:
        normed, attention = layer.input_layernorm(hidden), layer.self_attn

        def heads(product: mx.array, number: int) -> mx.array:
            return product.reshape(1, count, number, -1).swapaxes(1, 2)

        queries = attention.rope(heads(attention.q_proj(normed), attention.n_heads))
        keys = attention.rope(heads(attention.k_proj(normed), attention.n_kv_heads))
        values = heads(attention.v_proj(normed), attention.n_kv_heads)
        group = attention.n_heads // attention.n_kv_heads
        keys, values = mx.repeat(keys, group, axis=1), mx.repeat(values, group, axis=1)
        scores = (queries @ keys.swapaxes(-1, -2)) * attention.scale
        shares = mx.softmax(mx.where(mx.array(allowed), scores, -mx.inf), axis=-1)
        every.append(np.array(shares[0], np.float64))
        mixed = (shares @ values).swapaxes(1, 2).reshape(1, count, -1)
        hidden = hidden + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits = model.model.embed_tokens.as_linear(model.model.norm(hidden))
    return np.array(logits[0, -1]), every


def reference_scores(model: Any, prompt: list[int]) -> np.ndarray:
    """The importance of each token, by its definition, token by token."""
    tokens, count = list(prompt), len(prompt)
    total = np.zeros(count)
    for _ in range(LOOK_AHEAD):
        logits, layers = read(model, tokens, np.ones(len(tokens), bool))
        best = np.zeros(count)
        for shares in layers:
            # Among the prompt's tokens alone.
            rows = shares[:, -1, :count] / shares[:, -1, :count].sum(axis=-1, keepdims=True)
            for row in rows:
                smooth = [row[max(0, at - 6) : at + 7].mean() for at in range(count)]
                best = np.maximum(best, smooth)
        total += best
        tokens.append(int(logits.argmax()))
    return total / LOOK_AHEAD


def test_the_choice_is_that_of_a_direct_computation(models: dict[str, Any]) -> None:
    """Shares of heads in the open, in float64, pooled one by one; every share of the prompt."""
    model = models["llama"]
    prompt = PROMPT[:300]
    scores = reference_scores(model, prompt)
    for share in (0.2, 0.5, 0.9):
        row = Row(RowRequest(1, prompt, 5, prefill_keep=share), VOCAB_SIZE, 2048)
        chosen = DraftModel(runner_of(model), 0, words=VOCAB_SIZE).choose(row, 0, lambda: 0.0)
        assert chosen is not None
        assert chosen.tolist() == kept_tokens(scores, share).tolist()
        assert share * 300 <= len(chosen) < share * 300 + CHUNK_TOKENS


def test_whole_chunks_are_kept_by_importance_and_the_last_one_always() -> None:
    """At least the share; of equals the first; in order."""
    scores = np.zeros(100)
    scores[70] = 1.0
    wanted = [*range(64, 96), *range(96, 100)]
    assert kept_tokens(scores, 0.3).tolist() == wanted
    assert kept_tokens(scores, 0.37).tolist() == [*range(32), *wanted]
    assert kept_tokens(scores, 0.999).tolist() == list(range(100))
    assert kept_tokens(scores[:20], 0.1).tolist() == list(range(20))


def test_kept_tokens_are_read_at_their_own_positions(models: dict[str, Any]) -> None:
    """As by the whole prompt with the others masked out; the output follows the whole prompt."""
    model, engine_source = models["llama"], Choosing(models["llama"])
    engine = engine_of(model, engine_source)
    engine.insert([RowRequest(1, PROMPT[:200], 6, prefill_keep=0.4)])
    run = finish(engine)
    seen = np.zeros(200, bool)
    seen[engine_source.chosen[1]] = True
    assert 80 <= seen.sum() < 112
    tokens = PROMPT[:200]
    for token in run.ids(1):
        logits, _ = read(model, tokens, np.concatenate([seen, np.ones(len(tokens) - 200, bool)]))
        assert logits[token] >= logits.max() - 1e-4
        tokens = [*tokens, token]
    (kept,) = {prefill.kept for prefill in run.prefills}
    assert kept == seen.sum()
    assert run.prefills[-1].total == kept


@pytest.mark.parametrize("kind", ["llama", "sliding", "hybrid"])
def test_a_row_that_resumes_chooses_the_same_tokens(models: dict[str, Any], kind: str) -> None:
    """After any number of output tokens, beside other rows, parked or in a new engine."""
    model = models[kind]
    request = RowRequest(1, PROMPT, TOKENS, sampling=Sampling(temperature=0.8), seed=3, prefill_keep=0.5)
    whole = alone(model, request)
    assert len(whole) == TOKENS
    assert whole != alone(model, replace(request, prefill_keep=None))
    assert alone(model, replace(request, emitted=whole[:5])) == whole[5:]
    engine, run = engine_of(model), Run()
    engine.insert([request, RowRequest(2, PROMPT[:300], 40)])
    while len(run.ids(1)) < 4:
        step(engine, run)
    assert engine.park(1) == 0
    made = run.ids(1)
    engine.insert([replace(request, row=3, emitted=made)])
    finish(engine, run)
    assert made + run.ids(3) == whole


def test_other_rows_make_the_same_tokens(models: dict[str, Any]) -> None:
    """Rows that come and go around prompts that are read in part, some of which leave while they are read."""
    model, draw = models["llama"], random.Random(1)
    shares = [None, 0.3, None, 0.6]
    requests = [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((5, 90, 400)))],
            TOKENS,
            sampling=Sampling(temperature=0.7 * (row % 2), repetition_penalty=1.1),
            seed=row,
            logprobs=1 if row % 3 else None,
            prefill_keep=shares[row % 4],
        )
        for row in range(12)
    ]
    wanted = {request.row: alone(model, request) for request in requests}
    engine, run = engine_of(model, Choosing(model, waits=2)), Run()
    gone = (5, 7)
    for request in requests:
        assert engine.insert([request]) == []
        step(engine, run)
        if request.row in gone:
            engine.remove([request.row])
    finish(engine, run)
    assert run.failures == []
    for row in wanted.keys() - set(gone):
        assert run.ids(row) == wanted[row]


def test_decoding_rows_and_other_prompts_go_on_while_the_draft_model_reads(models: dict[str, Any]) -> None:
    """A token of a row in decode in each step; other prompts are computed in every second one at least."""
    model = models["llama"]
    source = Choosing(model, waits=10)
    engine, run = engine_of(model, source, prefill_chunk=64), Run()
    engine.insert([RowRequest(1, [5, 6, 7], 100, speculate=False)])
    while not run.ids(1):
        step(engine, run)
    engine.insert([RowRequest(2, PROMPT, 3, prefill_keep=0.5), RowRequest(3, PROMPT[:256], 1)])
    while not run.ended(3):
        made, asked = len(run.ids(1)), source.waited
        step(engine, run)
        assert len(run.ids(1)) == made + 1
        assert source.waited <= asked + 1
    # Four chunks, each in turn with the draft model.
    assert 3 <= source.waited <= 5
    assert not source.chosen
    finish(engine, run)
    assert len(run.ids(2)) == 3


def test_the_draft_model_reads_in_slices_of_bounded_time(models: dict[str, Any]) -> None:
    """One slice at least; another only where one more fits in the time. Slices do not depend on it."""
    ticks = iter(range(1000))
    source = DraftModel(runner_of(models["llama"], context_tokens=4096), 0, words=VOCAB_SIZE)
    row = Row(RowRequest(1, PROMPT * 3, 5, prefill_keep=0.5), VOCAB_SIZE, 4096)
    # The clock is read once before each slice and once behind it.
    assert source.choose(row, 0.5, lambda: next(ticks)) is None
    assert source.choose(row, 4.5, lambda: next(ticks)) is None
    calls = 2
    while (kept := source.choose(row, 0.5, lambda: next(ticks))) is None:
        calls += 1
    assert 4 <= calls <= 6
    other = DraftModel(runner_of(models["llama"], context_tokens=4096), 0, words=VOCAB_SIZE)
    assert other.choose(row, 0, lambda: 0.0).tolist() == kept.tolist()


def test_the_prefix_cache_is_neither_read_nor_filled(models: dict[str, Any]) -> None:
    """Neither by such a prompt, nor a plain one after it, nor that of a parked row with the same tokens."""
    model = models["llama"]
    engine = engine_of(model)
    request = RowRequest(1, PROMPT, TOKENS, prefill_keep=0.5)
    wanted = alone(model, request)

    def run_of(request: RowRequest) -> Run:
        assert engine.insert([request]) == []
        return finish(engine)

    assert run_of(request).ids(1) == wanted
    assert engine.stats().prompt_cache_entries == 0
    plain = run_of(replace(request, row=2, prefill_keep=None))
    assert plain.cached(2) == 0
    entries = engine.stats().prompt_cache_entries
    assert entries > 0
    again = run_of(replace(request, row=3))
    assert again.cached(3) == 0
    assert again.ids(3) == wanted
    assert engine.stats().prompt_cache_entries == entries
    run = Run()
    engine.insert([replace(request, row=4, prompt=PROMPT[::-1], prefill_keep=None)])
    while not run.ids(4):
        step(engine, run)
    assert engine.park(4) > 0
    turned = replace(request, row=5, prompt=PROMPT[::-1], emitted=run.ids(4))
    assert run_of(turned).cached(5) == 0


def test_penalties_count_the_whole_prompt(models: dict[str, Any]) -> None:
    """Tokens that were left out are still tokens of the prompt: a strong penalty keeps them from the output."""
    sampling = Sampling(repetition_penalty=100.0)
    request = RowRequest(1, PROMPT[:400], TOKENS, sampling=sampling, prefill_keep=0.1)
    output = alone(models["llama"], request)
    assert len(output) == TOKENS
    assert not set(output) & set(PROMPT[:400])


def test_without_a_draft_model_the_row_fails_alone(models: dict[str, Any]) -> None:
    """And the engine says so before."""
    model = models["llama"]
    for engine in (make_engine(model), make_engine(model, speculator=speculator())):
        assert not engine.info.prefill_keep
        (failure,) = engine.insert([RowRequest(1, PROMPT, 3, prefill_keep=0.5), RowRequest(2, [1, 2], 3)])
        assert failure.row == 1
        assert "draft model" in failure.message
        assert len(finish(engine).ids(2)) == 3
    assert engine_of(model).info.prefill_keep
