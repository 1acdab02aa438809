"""What `interface.Engine` promises, asked of every engine: the fake one, and MLX on caches of three kinds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.drafts import Self, speculator
from tests.support.engines import Run, finish, make_engine, step
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig
from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.engine.interface import Engine, RowRequest, RowToken, Sampling

VOCAB_SIZE = 320
COUNT = 12
HOT = Sampling(temperature=1.0, presence_penalty=0.5)
CACHE_BYTES = 64 << 20


@pytest.fixture(
    params=["fake", "llama", "sliding", "mamba", pytest.param("drafting", marks=pytest.mark.slow)]
)
def make(request, models):
    """Makes an engine of one kind; every option has the same meaning for all of them."""

    def make_one(
        *, chunk: int = 512, cache_bytes: int = CACHE_BYTES, rows_max: int = 32, context: int = 2048
    ) -> Any:
        if request.param == "fake":
            config = FakeEngineConfig(
                vocab_size=VOCAB_SIZE,
                context_tokens=context,
                prefill_chunk=chunk,
                prompt_cache_bytes=cache_bytes,
                rows_max=rows_max,
            )
            return FakeEngine(config)
        drafting = request.param == "drafting"
        return make_engine(
            models["llama" if drafting else request.param],
            speculator=speculator(Self(models["llama"]), widths=(1, 1, 2)) if drafting else None,
            context_tokens=context,
            prefill_chunk=chunk,
            prefill_chunk_idle=chunk,
            prompt_cache_bytes=cache_bytes,
            rows_max=rows_max,
        )

    return make_one


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * seed + length)
    return [draw.randrange(1, VOCAB_SIZE) for _ in range(length)]


def row(id_: int, length: int = 20, **fields: Any) -> RowRequest:
    fields = {"max_tokens": COUNT, "seed": id_, **fields}
    return RowRequest(id_, prompt(length, seed=id_), **fields)


def generate(engine: Engine, request: RowRequest) -> list[int]:
    """The output of `request` where there is no other."""
    assert engine.insert([request]) == []
    return finish(engine).ids(request.row)


_alone: dict[tuple[str, str], list[int]] = {}


@pytest.fixture
def alone(request, make):
    """The output of a request in an engine of its own, which is made once for all tests."""

    def generate_alone(asked: RowRequest) -> list[int]:
        key = request.node.callspec.params["make"], repr(asked)
        if key not in _alone:
            _alone[key] = generate(make(), asked)
        return _alone[key]

    return generate_alone


def is_empty(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.rows_decoding == stats.rows_prefilling == engine.memory().kv == 0


def back(request: RowRequest, id_: int, output: Sequence[int]) -> RowRequest:
    """`request` as it comes back after it was parked."""
    return replace(request, row=id_, emitted=list(output))


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_a_row_makes_the_same_tokens_alone_and_among_others(make, alone, sampling):
    """Whoever shares the batch, and however the prompt is cut."""
    rows = [row(id_, length, sampling=sampling) for id_, length in enumerate((1, 2, 7, 40, 90))]
    engine = make(chunk=16)
    assert engine.insert(rows) == []
    run = finish(engine)
    assert run.failures == []
    for request in rows:
        assert run.ids(request.row) == alone(request)
        assert run.finish(request.row) == "length"
    assert is_empty(engine)


def test_a_prefill_tells_how_far_it_is(make):
    """`done` rises to `total`, which is prompt and emitted."""
    engine = make(chunk=16)
    engine.insert([row(0, 40, emitted=[5, 6])])
    run = finish(engine)
    done = [prefill.done for prefill in run.prefills]
    assert done == sorted(set(done))
    assert done[-1] == 42
    assert {(prefill.row, prefill.total, prefill.cached) for prefill in run.prefills} == {(0, 42, 0)}


def test_a_row_goes_on_from_what_it_had_emitted(make, alone):
    """Each beginning of an output leads to the same end, and counts towards max_tokens."""
    request = row(0, sampling=HOT)
    whole = alone(request)
    for emitted in (1, 5, COUNT - 1):
        assert alone(back(request, 0, whole[:emitted])) == whole[emitted:]


def test_the_stop_token_is_the_last(make, alone):
    """The row ends with it, whatever is left."""
    whole = alone(row(0, sampling=HOT))
    engine = make()
    engine.insert([row(0, sampling=HOT, stop_token_ids=frozenset({whole[4]}))])
    run = finish(engine)
    assert run.ids(0) == whole[: whole.index(whole[4]) + 1]
    assert run.finish(0) == "stop"


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_reasoning_is_closed_at_its_bound(make, alone, sampling):
    """The closer and what follows it, wherever the row was parked or resumed; before the bound it changes nothing."""
    request = row(0, sampling=sampling)
    plain = alone(request)
    first = [token for token in range(1, VOCAB_SIZE) if token not in plain][:4]
    bound = thinking_bound(4, first[:2], first[2:3], opened=True, then=first[3:])
    bounded = replace(request, thinking=bound)
    output = generate(make(), bounded)
    assert output[:7] == [*plain[:4], *first[:2], first[3]]
    assert output[7:] == alone(back(request, 0, output[:7]))
    for steps in range(1, COUNT):
        engine, run = make(), Run()
        engine.insert([bounded])
        for _ in range(steps):
            step(engine, run)
        if not run.ended(0):
            engine.park(0)
            engine.insert([back(bounded, 1, run.ids(0))])
            finish(engine, run)
        assert run.ids(0) + run.ids(1) == output
    for free in (replace(bound, tokens=COUNT), replace(bound, opened=False)):
        assert generate(make(), replace(request, thinking=free)) == plain


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_no_stop_token_is_drawn_before_min_tokens(make, alone, sampling):
    """Up to that index others come in their place, beside rows without it, parked and resumed as in one piece; from it
    on the row ends as ever.
    """
    whole = alone(row(0, sampling=sampling))
    stops = frozenset(whole[:3])
    late = row(0, sampling=msgspec.structs.replace(sampling, min_tokens=6), stop_token_ids=stops)
    assert len(alone(row(0, sampling=sampling, stop_token_ids=stops))) == 1
    engine = make()
    engine.insert([late, row(1, sampling=sampling)])
    run = finish(engine)
    made = run.ids(0)
    assert len(made) >= 6
    assert not stops & {*made[:6], *made[:-1]}
    assert run.finish(0) == ("stop" if made[-1] in stops else "length")
    assert run.ids(1) == alone(row(1, sampling=sampling))
    for cut in {4, len(made) - 1}:
        assert generate(engine, back(late, 0, made[:cut])) == made[cut:]
    run = Run()
    engine.insert([late])
    while len(run.ids(0)) < 3:
        step(engine, run)
    engine.park(0)
    engine.insert([back(late, 2, run.ids(0))])
    assert run.ids(0) + finish(engine).ids(2) == made
    # With one token left, nothing else comes up to that index.
    every = replace(late, stop_token_ids=frozenset(range(VOCAB_SIZE)) - {made[0]})
    assert generate(engine, every)[:6] == [made[0]] * 6


def test_an_open_row_ends_when_the_context_is_full(make):
    """Without max_tokens, prompt and output together are as long as the context."""
    engine = make(context=128)
    engine.insert([row(0, 120, max_tokens=None), row(1, 120, max_tokens=None, emitted=[4] * 6)])
    run = finish(engine)
    assert [len(run.ids(id_)) for id_ in (0, 1)] == [8, 2]
    assert [run.finish(id_) for id_ in (0, 1)] == ["length", "length"]


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"emitted": [VOCAB_SIZE + 1]},
        {"max_tokens": 0},
        {"emitted": [1] * COUNT},
        {"prompt": [3] * 2048, "max_tokens": None},
    ],
)
def test_a_row_that_cannot_be_added_is_named_and_the_others_go_on(make, alone, bad):
    """Out of range, empty, or with nothing left to do."""
    engine = make()
    failures = engine.insert([row(0), replace(row(1), **bad), row(2)])
    assert [failure.row for failure in failures] == [1]
    run = finish(engine)
    assert [run.ids(id_) for id_ in (0, 2)] == [alone(row(id_)) for id_ in (0, 2)]


def test_rows_over_the_limit_and_ids_in_use_are_refused(make):
    """An id is free again when its row has left."""
    engine = make(rows_max=2)
    failures = engine.insert([row(1), row(1), row(2), row(3)])
    assert [failure.row for failure in failures] == [1, 3]
    finish(engine)
    assert engine.insert([row(1)]) == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_row_is_removed_in_any_phase_and_only_once(make, alone, steps):
    """Nothing more is heard of it, unknown ids are ignored, and the neighbour's tokens are whole."""
    engine = make(chunk=16)
    engine.insert([row(0, 40), row(1, 5)])
    run = Run()
    for _ in range(steps):
        step(engine, run)
    engine.remove([77, 0, 0, -1])
    engine.remove([0])
    seen = len(run.ids(0))
    finish(engine, run)
    assert len(run.ids(0)) == seen
    assert run.ids(1) == alone(row(1, 5))
    assert is_empty(engine)


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_a_parked_row_comes_back_with_the_same_tokens(make, alone, steps, sampling):
    """In any phase, greedy and seeded; in decode nothing is read again."""
    rows = [row(0, 40, sampling=sampling, logprobs=1), row(1, 5, sampling=sampling)]
    engine = make(chunk=16)
    engine.insert(rows)
    run = Run()
    for _ in range(steps):
        step(engine, run)
    output = run.ids(0)
    kept = engine.park(0)
    assert engine.stats().rows_decoding + engine.stats().rows_prefilling == 1
    for _ in range(3):
        step(engine, run)
    assert run.ids(0) == output
    assert engine.insert([back(rows[0], 10, output)]) == []
    finish(engine, run)
    assert run.failures == []
    assert output + run.ids(10) == alone(rows[0])
    assert run.ids(1) == alone(rows[1])
    assert run.cached(10) == kept
    if output:
        assert kept == 40 + len(output) - 1
    assert all(token.logprobs is not None for token in run.tokens[10])
    assert engine.memory().parked == 0


def test_rows_are_parked_and_come_back_again_and_again(make, alone):
    """One row after the other, at every third step; none of them reads anything twice."""
    rows = [row(id_, 20 + id_, sampling=HOT) for id_ in range(3)]
    engine = make()
    engine.insert(rows)
    output: dict[int, list[int]] = {id_: [] for id_ in range(3)}
    here = {id_: id_ for id_ in range(3)}
    read = []
    for turn in range(1, 200):
        result = engine.next()
        assert result.failures == []
        for prefill in result.prefills:
            if prefill.row >= 1000 and prefill.done == prefill.total:
                read.append(prefill.total - 1 - prefill.cached)
        for token in result.tokens:
            output[here[token.row]].append(token.token)
            if token.finish is not None:
                del here[token.row]
        if not here:
            break
        if turn % 3:
            continue
        parked = list(here)[turn // 3 % len(here)]
        id_ = here.pop(parked)
        engine.park(parked)
        here[1000 + turn] = id_
        assert engine.insert([back(rows[id_], 1000 + turn, output[id_])]) == []
    assert [output[id_] for id_ in range(3)] == [alone(request) for request in rows]
    assert len(read) >= 3
    assert sum(read) == 0


def test_a_row_that_is_not_there_is_parked_without_an_error(make):
    """Unknown, ended and already parked ids all give 0."""
    engine = make()
    assert engine.park(5) == 0
    engine.insert([row(0), row(1, max_tokens=100)])
    run = Run()
    for _ in range(20):
        step(engine, run)
    assert run.finish(0) == "length"
    assert engine.park(0) == 0
    assert engine.park(1) > 0
    assert engine.park(1) == 0


def test_without_a_prompt_cache_a_parked_row_is_read_again(make, alone):
    """The tokens are the same; the prefill says what it cost."""
    request = row(0, 30, sampling=HOT)
    engine = make(cache_bytes=0)
    engine.insert([request])
    run = Run()
    while len(run.ids(0)) < 4:
        step(engine, run)
    assert engine.park(0) == engine.memory().parked == 0
    output = run.ids(0)
    engine.insert([back(request, 1, output)])
    finish(engine, run)
    assert output + run.ids(1) == alone(request)
    assert run.cached(1) == 0


def test_parked_rows_are_evicted_last(make):
    """Everything else that is kept goes before them; a limit of nothing takes them too."""
    engine = make()
    engine.insert([row(0, 50, max_tokens=60), row(1, 60, max_tokens=60)])
    run = Run()
    while len(run.ids(1)) < 3:
        step(engine, run)
    assert engine.park(0) > 0
    finish(engine, run)
    before = engine.memory()
    assert before.parked > 0
    assert before.prompt_cache > 0
    assert engine.limit_prompt_cache(before.parked) == before.prompt_cache
    assert (engine.memory().parked, engine.memory().prompt_cache) == (before.parked, 0)
    engine.insert([back(row(0, 50, max_tokens=60), 2, run.ids(0))])
    finish(engine, run)
    assert run.cached(2) == 50 + len(run.ids(0)) - 1
    engine.limit_prompt_cache(1 << 40)
    engine.insert([row(3, 50, max_tokens=60)])
    while not run.ids(3):
        step(engine, run)
    engine.park(3)
    assert engine.limit_prompt_cache(0) > 0
    assert (engine.memory().parked, engine.memory().prompt_cache) == (0, 0)


def test_a_limit_holds_from_now_on(make):
    """At every step, and never more than at first; a higher one lets more be kept again."""
    engine = make(cache_bytes=200_000)
    assert engine.limit_prompt_cache(60_000) == 0
    run = Run()
    for id_ in range(6):
        engine.insert([row(id_, 40)])
        while run.finish(id_) is None if id_ in run.tokens else True:
            step(engine, run)
            memory = engine.memory()
            assert memory.parked + memory.prompt_cache <= 60_000
    engine.limit_prompt_cache(0)
    assert engine.park(9) == 0
    generate(engine, row(7, 40))
    assert engine.memory().prompt_cache == 0
    engine.limit_prompt_cache(1 << 40)
    for id_ in range(8, 20):
        generate(engine, row(id_, 40))
        assert engine.memory().prompt_cache <= 200_000
    assert engine.memory().prompt_cache > 0


def test_a_parked_row_that_will_not_come_back_is_kept_like_any_other(make, alone):
    """To remove it is enough: it takes no precedence any more, and a longer prompt goes on from it."""
    request = row(0, 50, max_tokens=60)
    engine = make()
    engine.insert([request])
    run = Run()
    while len(run.ids(0)) < 3:
        step(engine, run)
    engine.park(0)
    engine.remove([0])
    assert engine.memory().parked == 0
    assert engine.memory().prompt_cache > 0
    longer = RowRequest(1, [*request.prompt, *run.ids(0), 9, 9], COUNT)
    engine.insert([longer])
    finish(engine, run)
    assert run.cached(1) >= 50 + len(run.ids(0)) - 1
    assert run.ids(1) == alone(longer)


def test_reset_drops_everything_and_the_engine_serves_on(make, alone):
    """Rows, parked rows and what was kept."""
    engine = make()
    engine.insert([row(0, 50), row(1, 50)])
    run = Run()
    while not run.ids(1):
        step(engine, run)
    engine.park(1)
    engine.reset()
    assert is_empty(engine)
    assert (engine.memory().parked, engine.memory().prompt_cache) == (0, 0)
    assert engine.next().tokens == []
    assert generate(engine, row(0, 50)) == alone(row(0, 50))


def test_a_row_holds_at_most_what_was_projected(make):
    """At every step of one row, in prefill and in decode; the projection never falls."""
    engine = make(chunk=33)
    projected = [engine.project_bytes(tokens) for tokens in range(0, 2048, 64)]
    assert projected == sorted(projected)
    engine.insert([row(0, 300, max_tokens=300)])
    run = Run()
    for _ in range(1000):
        step(engine, run)
        memory = engine.memory()
        assert memory.kv <= engine.project_bytes(300 + len(run.ids(0)))
        if len(run.ids(0)) == 300:
            break
        assert memory.kv > 0
    assert run.finish(0) == "length"


def test_memory_adds_up_and_comes_back(make):
    """Every part is counted; when all rows have left, only what is kept remains."""
    engine = make(cache_bytes=0)
    empty = engine.memory()
    assert (empty.kv, empty.padding, empty.parked, empty.prompt_cache) == (0, 0, 0, 0)
    engine.insert([row(id_, 10 + 50 * id_) for id_ in range(4)])
    run = Run()
    while len(run.tokens) < 4:
        step(engine, run)
    busy = engine.memory()
    assert 0 <= busy.padding < busy.kv
    assert busy.active >= busy.kv
    assert busy.peak >= busy.active
    finish(engine, run)
    assert is_empty(engine)
    assert engine.memory().padding == 0


def test_close_may_be_called_twice(make):
    """Whatever is in it."""
    engine = make()
    engine.insert([row(0)])
    engine.next()
    engine.close()
    engine.close()


def test_forced_output_has_the_log_probabilities_of_sampled_output(make):
    """Given output has the log-probabilities of sampled output, however it is cut, and the row goes on the same."""
    request = row(0, 90, logprobs=2)
    sampled = _tokens(make(), request)
    ids = [token.token for token in sampled]
    # With two rows at most, logits are computed two at a time.
    for options in ({"chunk": 16}, {"rows_max": 2}):
        for emitted, forced in ((0, 1), (0, COUNT), (3, 7), (3, COUNT), (9, 8)):
            engine = make(**options)
            again = _tokens(engine, replace(request, emitted=ids[:emitted], forced=ids[:forced]))
            assert [token.token for token in again] == ids[emitted:]
            for token, before in zip(again, sampled[emitted:], strict=True):
                assert token.logprobs.logprob == pytest.approx(before.logprobs.logprob, abs=1e-4)
                assert [id_ for id_, _ in token.logprobs.top] == [id_ for id_, _ in before.logprobs.top]
            assert [token.finish for token in again] == [None] * (len(again) - 1) + ["length"]
            assert is_empty(engine)


def test_forced_output_does_not_stop_and_is_not_counted_as_generated(make):
    """An end token in it is text like any other; without `logprobs` it has none."""
    engine = make()
    request = row(0, 20, forced=[7, 8, 7], stop_token_ids=frozenset({7, 8}), max_tokens=3)
    tokens = _tokens(engine, request)
    assert [(token.token, token.logprobs, token.finish) for token in tokens] == [
        (7, None, None), (8, None, None), (7, None, "length"),
    ]  # fmt: skip
    assert engine.stats().generated_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_row_with_forced_output_is_parked_and_comes_back(make, steps):
    """With each token once, in whatever phase it left; others beside it are not disturbed."""
    request, other = row(0, 90, logprobs=1, max_tokens=60), row(1, 30)
    request = replace(request, forced=prompt(40, seed=9))
    whole = _tokens(make(chunk=16, rows_max=4), request)
    alone = _tokens(make(), other)
    engine, run = make(chunk=16, rows_max=4), Run()
    engine.insert([request, other])
    for _ in range(5 + steps):
        step(engine, run)
    engine.park(0)
    engine.insert([back(request, 2, run.ids(0))])
    finish(engine, run)
    assert run.failures == []
    tokens = run.tokens.get(0, []) + run.tokens[2]
    assert [token.token for token in tokens] == [token.token for token in whole]
    assert [token.logprobs.logprob for token in tokens] == pytest.approx(
        [token.logprobs.logprob for token in whole], abs=1e-4
    )
    assert run.ids(1) == [token.token for token in alone]


def test_a_prompt_before_forced_output_comes_from_the_prompt_cache(make):
    """Answers to one question are compared at the cost of the answers."""
    engine = make()
    question = prompt(200)
    cached = []
    for id_ in range(2):
        request = row(id_, forced=prompt(5, seed=id_), logprobs=0, max_tokens=5)
        run = Run()
        engine.insert([replace(request, prompt=question)])
        finish(engine, run)
        cached.append(run.cached(id_))
    assert cached[0] == 0
    # The fake engine finds whole prompts, and a state that cannot be cut is kept at the end of one.
    assert cached[1] >= 128 or isinstance(engine, FakeEngine) or engine._store.keeps_states


def _tokens(engine: Engine, request: RowRequest) -> list[RowToken]:
    """The tokens of `request` where there is no other."""
    assert engine.insert([request]) == []
    run = finish(engine)
    assert run.failures == []
    return run.tokens[request.row]
