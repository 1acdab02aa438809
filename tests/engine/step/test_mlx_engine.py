"""The MLX engine makes what mlx-lm makes, whoever shares the batch, and survives its rows."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.utils import load as load_with_mlx_lm
from mlx_lm.utils import quantize_model, save

from tests.support.engines import Run, finish, greedy, make_engine, runner_of, step
from tests.support.models import VOCAB_SIZE
from zmqengine import pico
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.load.loader import load
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine

COUNT = 16


def some_prompts(
    count: int, seed: int = 1, lengths: tuple[int, ...] = (1, 2, 5, 20, 50, 100)
) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.choice(lengths))] for _ in range(count)]


def requests(prompts: list[list[int]], **fields) -> list[RowRequest]:
    return [RowRequest(row, prompt, COUNT, **fields) for row, prompt in enumerate(prompts)]


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
def test_greedy_tokens_are_those_of_mlx_lm_alone_and_16_at_once(models, shape):
    """Ragged prompts, some of one token; layers that see all, a window, or a state."""
    model = models[shape]
    prompts = some_prompts(16)
    wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
    engine = make_engine(model)
    engine.insert(requests(prompts))
    together = finish(engine)
    assert [together.ids(row) for row in range(16)] == wanted
    for prompt, tokens in zip(prompts[:3], wanted, strict=False):
        alone = make_engine(model)
        alone.insert(requests([prompt]))
        assert finish(alone).ids(0) == tokens


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba"])
def test_rows_that_come_and_go_do_not_change_each_other(models, shape):
    """Staggered arrivals, different lengths, tiny prefill chunks, aborts: every stream is what it is alone."""
    model = models[shape]
    prompts = some_prompts(12, seed=2)
    engine = make_engine(model, prefill_chunk=16, prefill_chunk_idle=32, prompt_cache_bytes=0)
    run = Run()
    draw = random.Random(3)
    for row, prompt in enumerate(prompts):
        assert engine.insert([RowRequest(row, prompt, draw.randrange(1, COUNT))]) == []
        for _ in range(draw.randrange(4)):
            step(engine, run)
        if row % 5 == 4:
            engine.remove([row - 2])
    finish(engine, run)
    assert run.failures == []
    for row, prompt in enumerate(prompts):
        ids = run.ids(row)
        assert ids == greedy(model, prompt, COUNT)[: len(ids)]
        if row % 5 != 2:
            assert run.finish(row) == "length"


def test_tokens_on_pico_are_those_of_mlx_lm_generate():
    """20 prompts through the batch end where and as `stream_generate` ends them."""
    model, tokenizer = load_with_mlx_lm(str(pico.model_path()))  # type: ignore[misc]
    loaded = load(str(pico.model_path()))
    words = ["Once upon a time", "One day", "Tom had a", "The cat", "There was a little"]
    prompts = [tokenizer.encode(f"{start}{rest}") for start in words for rest in ("", " big", " and", " red")]
    wanted = [
        [response.token for response in stream_generate(model, tokenizer, prompt, max_tokens=COUNT)]
        for prompt in prompts
    ]
    engine = MlxEngine(runner_of(loaded.model), loaded.info, EngineOptions(prefill_ms=0))
    stop = loaded.info.eos_token_ids
    engine.insert(
        [RowRequest(row, prompt, COUNT, stop_token_ids=stop) for row, prompt in enumerate(prompts[:16])]
    )
    run = finish(engine)
    engine.insert([RowRequest(row, prompts[row], COUNT, stop_token_ids=stop) for row in range(16, 20)])
    finish(engine, run)
    assert [run.ids(row) for row in range(20)] == wanted


def test_a_quantised_copy_loads_and_generates_the_same_as_in_mlx_lm(model_directory, tmp_path):
    """mlx-lm's own quantiser, saver and loader; then our batch."""
    model, tokenizer, config = load_with_mlx_lm(str(model_directory), return_config=True)  # type: ignore[misc]
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save(tmp_path / "quantised", str(model_directory), model, tokenizer, config)
    loaded = load(str(tmp_path / "quantised"))
    assert loaded.info.parameter_bytes < load(str(model_directory)).info.parameter_bytes / 2
    prompts = some_prompts(4)
    wanted = [greedy(loaded.model, prompt, COUNT) for prompt in prompts]
    engine = MlxEngine(runner_of(loaded.model), loaded.info, EngineOptions(prefill_ms=0))
    engine.insert(requests(prompts))
    run = finish(engine)
    assert [run.ids(row) for row in range(4)] == wanted


def test_a_row_ends_at_its_stop_token_or_its_length(model):
    """The stop token is the last token; max_tokens counts the whole output."""
    prompt = some_prompts(1)[0]
    tokens = greedy(model, prompt, COUNT)
    engine = make_engine(model)
    engine.insert(
        [
            RowRequest(0, prompt, COUNT, stop_token_ids=frozenset({tokens[4], tokens[9]})),
            RowRequest(1, prompt, 1),
            RowRequest(2, prompt, 7, stop_token_ids=frozenset({tokens[6]})),
        ]
    )
    run = finish(engine)
    first = tokens.index(tokens[4])
    assert run.ids(0) == tokens[: first + 1]
    assert run.finish(0) == "stop"
    assert run.ids(1) == tokens[:1]
    assert run.finish(1) == "length"
    assert run.finish(2) == "stop"


def test_a_row_goes_on_from_emitted_tokens(model):
    """After a crash the same request with `emitted` gives the rest of the same stream."""
    prompt = some_prompts(1)[0]
    tokens = greedy(model, prompt, COUNT)
    engine = make_engine(model)
    engine.insert([RowRequest(0, prompt, COUNT, emitted=tokens[:9])])
    run = finish(engine)
    assert run.ids(0) == tokens[9:]
    assert run.prefills[-1].total == len(prompt) + 9


def test_a_request_that_arrives_starts_its_prefill_in_the_next_step(model):
    """smg #1427 B: admission is per step, not when the batch has drained."""
    engine = make_engine(model)
    engine.insert(requests(some_prompts(3, lengths=(20,))))
    run = Run()
    for _ in range(4):
        step(engine, run)
    assert len(run.tokens) == 3
    engine.insert([RowRequest(9, some_prompts(1, seed=5, lengths=(40,))[0], COUNT)])
    result = engine.next()
    assert [prefill.row for prefill in result.prefills] == [9]
    assert sorted(token.row for token in result.tokens) == [0, 1, 2, 9]


@pytest.mark.parametrize("steps", range(8))
def test_a_row_can_be_removed_in_any_phase(model, steps):
    """smg #1427 review: aborts cover every phase, are per row and idempotent; a bad id leaves no phantoms."""
    prompts = [some_prompts(1, seed=8, lengths=(60,))[0], some_prompts(1, seed=9, lengths=(5,))[0]]
    engine = make_engine(model, prefill_chunk=16, prefill_chunk_idle=16)
    engine.insert(requests(prompts))
    run = Run()
    for _ in range(steps):
        step(engine, run)
    seen = len(run.ids(0))
    engine.remove([77, 0, 0, -5])
    engine.remove([0])
    stats = engine.stats()
    assert stats.rows_decoding + stats.rows_prefilling <= 1
    finish(engine, run)
    assert len(run.ids(0)) == seen
    assert run.ids(1) == greedy(model, prompts[1], COUNT)
    assert engine.memory().kv == 0


def test_everybody_can_be_removed_at_once_and_the_engine_goes_on(model):
    """An empty batch is no special case."""
    engine = make_engine(model)
    engine.insert(requests(some_prompts(5)))
    run = Run()
    for _ in range(5):
        step(engine, run)
    engine.remove(range(5))
    assert engine.next().tokens == []
    prompt = some_prompts(1)[0]
    engine.insert([RowRequest(8, prompt, COUNT)])
    assert finish(engine, run).ids(8) == greedy(model, prompt, COUNT)


@pytest.mark.parametrize(
    "poison",
    [
        {"prompt": []},
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [5], "emitted": [1 << 40]},
        {"prompt": [5], "sampling": Sampling(logit_bias={VOCAB_SIZE + 1: 1.0})},
        {"prompt": [5], "sampling": Sampling(temperature=float("nan"))},
        {"prompt": ["x"]},
        {"prompt": [5], "sampling": Sampling(logit_bias={4: "x"})},  # type: ignore[dict-item]
    ],
)
def test_a_poisoned_row_fails_alone(model, poison):
    """mlx-lm 0.32.2, measured: an id outside the vocabulary is an unchecked write; it must never reach MLX."""
    good = some_prompts(2)
    engine = make_engine(model)
    failures = engine.insert(
        [
            RowRequest(0, good[0], COUNT),
            RowRequest(1, max_tokens=COUNT, **poison),
            RowRequest(2, good[1], COUNT),
        ]
    )
    run = finish(engine)
    assert [failure.row for failure in failures + run.failures] == [1]
    assert [run.ids(0), run.ids(2)] == [greedy(model, prompt, COUNT) for prompt in good]


def test_a_row_whose_logits_are_not_numbers_fails_alone(model):
    """NaN is reported, not turned into token 0 for ever; the neighbours' streams are whole."""

    class Poisoned:
        layers = model.layers

        def make_cache(self):
            return model.make_cache()

        def __call__(self, inputs, cache=None):
            logits = model(inputs, cache=cache)
            return mx.where((inputs[:, -1:] == 7)[..., None], mx.nan, logits)

    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5, top_k=5)):
        engine = make_engine(Poisoned())
        engine.insert([RowRequest(0, [3, 7], COUNT, sampling=sampling), RowRequest(1, [3, 8], 3)])
        run = finish(engine)
        assert [failure.row for failure in run.failures] == [0]
        assert run.ids(0) == []
        assert len(run.ids(1)) == 3 or 7 in run.ids(1)
        assert engine.stats().prompt_cache_entries == 0


def test_a_step_that_raises_loses_the_batch_and_nothing_else(model):
    """The exception comes out of `next()`; after `reset()` the engine serves as before."""
    faults: list[Exception] = []

    class Faulty:
        layers = model.layers

        def make_cache(self):
            return model.make_cache()

        def __call__(self, inputs, cache=None):
            if cache is not None and cache[0] is not None and inputs.shape[0] == 3 and faults:
                raise faults.pop()
            return model(inputs, cache=cache)

    engine = make_engine(Faulty())
    faults.append(RuntimeError("out of memory"))
    engine.insert(requests(some_prompts(3)))
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(engine)
    engine.reset()
    stats, memory = engine.stats(), engine.memory()
    assert (stats.rows_decoding, stats.rows_prefilling, memory.kv, memory.prompt_cache) == (0, 0, 0, 0)
    prompts = some_prompts(3)
    engine.insert(requests(prompts))
    run = finish(engine)
    assert [run.ids(row) for row in range(3)] == [greedy(model, prompt, COUNT) for prompt in prompts]


def test_rows_over_the_limit_are_refused(model):
    """The engine never holds more rows than it said."""
    engine = make_engine(model, rows_max=2)
    assert [failure.row for failure in engine.insert(requests(some_prompts(4)))] == [2, 3]
    finish(engine)
    assert engine.insert(requests(some_prompts(2))) == []
    assert [failure.row for failure in engine.insert(requests(some_prompts(1)))] == [0]


def test_a_model_whose_caches_do_not_merge_runs_one_row_at_a_time(model):
    """Chunked and concatenating caches are served without batching and without the prompt cache."""

    class Unmergeable:
        layers = model.layers

        def make_cache(self):
            from mlx_lm.models.cache import ConcatenateKVCache

            return [ConcatenateKVCache() for _ in model.layers]

        def __call__(self, inputs, cache=None):
            return model(inputs, cache=cache)

    prompts = some_prompts(2)
    engine = make_engine(Unmergeable(), prefill_chunk=16, prefill_chunk_idle=16)
    assert engine.rows_max == 1
    assert not engine.info.batchable
    assert make_engine(model).info.batchable
    for prompt in prompts:
        assert [failure.row for failure in engine.insert(requests([prompt, prompt]))] == [1]
        assert finish(engine).ids(0) == greedy(model, prompt, COUNT)
    for steps in (1, 6):
        engine.insert(requests(prompts[:1]))
        run = Run()
        for _ in range(steps):
            step(engine, run)
        assert engine.park(0) == 0
        made = run.ids(0)
        engine.insert([RowRequest(1, prompts[0], COUNT, emitted=made)])
        assert made + finish(engine, run).ids(1) == greedy(model, prompts[0], COUNT)


def test_parked_rows_that_differ_in_their_log_probabilities_alone_are_not_mixed_up(model):
    """The token on its way when a row was parked comes with as many as its own row asked for."""
    (prompt,) = some_prompts(1)
    engine, run = make_engine(model), Run()
    rows = [RowRequest(row, prompt, COUNT, logprobs=top) for row, top in enumerate((None, 2))]
    engine.insert(rows)
    step(engine, run)
    step(engine, run)
    for row in rows:
        assert engine.park(row.row) > 0
    engine.insert([replace(row, row=10 + row.row, emitted=run.ids(row.row)) for row in reversed(rows)])
    finish(engine, run)
    told = [[*run.tokens.get(row, []), *run.tokens[10 + row]] for row in range(2)]
    assert [token.token for token in told[0]] == greedy(model, prompt, COUNT)
    assert all(token.logprobs is None for token in told[0])
    assert all(token.logprobs is not None for token in told[1])


def test_the_engine_runs_on_the_thread_that_built_it_while_another_waits(model):
    """smg #1427 A, vllm-mlx #479: load, step, remove and close on one thread that is not the main one."""
    prompts = some_prompts(3)
    wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
    outcome: list[object] = []

    def serve() -> None:
        try:
            loaded = load(str(pico.model_path()))
            engine = MlxEngine(runner_of(loaded.model), loaded.info, EngineOptions(prefill_ms=0))
            engine.insert(requests([[9, 8, 7], [5, 6]], sampling=Sampling(temperature=1.0), logprobs=2))
            run = finish(engine)
            engine.remove([0])
            engine.close()
            outcome.append(len(run.ids(0)))
        except BaseException as error:  # noqa: BLE001 - the test reports it
            outcome.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert outcome == [COUNT]
    engine = make_engine(model)
    engine.insert(requests(prompts))
    run = finish(engine)
    assert [run.ids(row) for row in range(3)] == wanted


def test_counters_count(model):
    """Stats say what was read, made and held."""
    engine = make_engine(model)
    engine.insert(requests(some_prompts(2, lengths=(20,))))
    run = Run()
    for _ in range(3):
        step(engine, run)
    assert engine.memory().kv > 0
    finish(engine, run)
    stats = engine.stats()
    assert stats.generated_tokens == 2 * COUNT
    assert stats.prompt_tokens == 2 * 19
    assert (engine.memory().kv, stats.rows_decoding) == (0, 0)
    assert engine.memory().active > 0


def test_close_may_be_called_twice(model):
    """Closing frees the batch, whatever is in it."""
    engine = make_engine(model)
    engine.insert(requests(some_prompts(2)))
    engine.next()
    engine.close()
    engine.close()
    assert engine.memory().kv == 0
