"""A row whose logits are not numbers fails alone, and leaves nothing behind that others could catch it from."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.support.engines import Run, finish, greedy, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest

COUNT = 6
BAD = 7
LONG = [(11 * place) % 300 + 8 for place in range(60)]


class Poisoned:
    """A model whose logits after token BAD are not numbers while it is `ill`."""

    def __init__(self, model, *, into_caches: bool = False) -> None:
        self.layers = model.layers
        self.ill = True
        self._model = model
        self._into_caches = into_caches

    def make_cache(self):
        return self._model.make_cache()

    def __call__(self, inputs, cache=None):
        logits = self._model(inputs, cache=cache)
        bad = mx.any(inputs == BAD, axis=1)
        if self.ill and self._into_caches and cache is not None:
            for layer in cache:
                if isinstance(layer.keys, mx.array) and layer.keys.shape[0] == inputs.shape[0]:
                    layer.keys = mx.where(bad[:, None, None, None], mx.nan, layer.keys)
        return mx.where((inputs[:, -1:] == BAD)[..., None], mx.nan, logits) if self.ill else logits


def kept(engine) -> int:
    return engine.stats().prompt_cache_entries


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("beside", [0, 2])
def test_a_row_without_a_finite_logit_leaves_nothing_to_others(model, length, beside):
    """Not its prompt, read alone or with others, and not later either; a healthy row with the same prompt is whole."""
    poisoned = Poisoned(model)
    engine = make_engine(poisoned)
    prompt = [*LONG[:length], BAD]
    others = [RowRequest(1 + row, LONG[row + 1 : row + 9], COUNT) for row in range(beside)]
    engine.insert([RowRequest(0, prompt, COUNT), *others])
    run = finish(engine)
    assert [failure.row for failure in run.failures] == [0]
    assert kept(engine) == 0
    assert engine.memory().prompt_cache == 0
    poisoned.ill = False
    engine.insert([RowRequest(9, prompt, COUNT)])
    finish(engine, run)
    assert run.cached(9) == 0
    assert run.ids(9) == greedy(model, prompt, COUNT)


def test_nobody_goes_on_from_a_prompt_before_its_first_logit(model):
    """A row with the same beginning waits for that logit, and reads for itself when it is none."""
    poisoned = Poisoned(model)
    engine = make_engine(poisoned, prefill_chunk=2048)
    prompt = [(5 * place) % 300 + 8 for place in range(400)]
    engine.insert([RowRequest(0, [*prompt, BAD], COUNT), RowRequest(1, [*prompt, 8], COUNT)])
    run = finish(engine)
    assert [failure.row for failure in run.failures] == [0]
    assert run.cached(1) == 0
    assert run.ids(1) == greedy(model, [*prompt, 8], COUNT)


def assert_removal_leaves_only_numbers(engine, poisoned, run, prompt, expected):
    """Row 0 goes; the same prompt, with the model well again, is read from its first token."""
    engine.remove([0])
    poisoned.ill = False
    engine.insert([RowRequest(1, prompt, COUNT)])
    finish(engine, run)
    assert run.cached(1) == 0
    assert run.ids(1) == expected


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_row_that_is_removed_before_its_logit_leaves_only_numbers(model, steps):
    """In prefill, and with its first step on its way."""
    poisoned = Poisoned(model, into_caches=True)
    engine = make_engine(poisoned, prefill_chunk=32, prefill_chunk_idle=32)
    prompt = [*LONG[:20], BAD, *LONG[20:], BAD]
    engine.insert([RowRequest(0, prompt, COUNT)])
    run = Run()
    for _ in range(steps):
        step(engine, run)
    assert_removal_leaves_only_numbers(engine, poisoned, run, prompt, greedy(model, prompt, COUNT))


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_row_that_spoils_in_decode_keeps_what_was_good(model, logprobs):
    """Its prompt gave a finite logit and may be used; what came after may not."""
    prompt = LONG[:30]
    tokens = greedy(model, prompt, COUNT)
    spoiler = tokens[3]
    assert spoiler not in prompt
    assert spoiler not in tokens[:3]

    class SpoiltLater(Poisoned):
        def __call__(self, inputs, cache=None):
            return mx.where((inputs[:, -1:] == spoiler)[..., None], mx.nan, self._model(inputs, cache=cache))

    engine = make_engine(SpoiltLater(model))
    engine.insert([RowRequest(0, prompt, COUNT, logprobs=logprobs)])
    run = finish(engine)
    assert run.ids(0) == tokens[:4]
    assert [failure.row for failure in run.failures] == [0]
    engine.insert([RowRequest(1, [*prompt, *tokens[:4], 9], 1)])
    finish(engine, run)
    assert run.cached(1) == 29


def test_a_parked_row_with_a_bad_step_on_its_way_keeps_nothing(model):
    """It is read again when it comes back, and fails there. A GPU's first step is reported by the one after it."""
    engine = make_engine(Poisoned(model), device=Device(is_gpu=True))
    prompt = [*LONG[:30], BAD]
    engine.insert([RowRequest(0, prompt, COUNT)])
    run = Run()
    step(engine, run)
    step(engine, run)
    assert engine.park(0) == 0
    assert engine.memory().parked == 0
    engine.insert([RowRequest(1, prompt, COUNT)])
    finish(engine, run)
    assert [failure.row for failure in run.failures] == [1]


def test_a_row_that_is_parked_before_its_logit_and_removed_leaves_nothing(model):
    """Nobody knows whether its caches hold numbers: they do not."""
    poisoned = Poisoned(model, into_caches=True)
    engine = make_engine(poisoned, prefill_chunk=32, prefill_chunk_idle=32)
    prompt = [*LONG[:20], BAD, *LONG[20:]]
    engine.insert([RowRequest(0, prompt, COUNT)])
    run = Run()
    step(engine, run)
    assert engine.park(0) == 32
    assert_removal_leaves_only_numbers(engine, poisoned, run, prompt, greedy(model, prompt, COUNT))


def test_the_vocabulary_holds_the_bad_token():
    """Or these tests would show nothing."""
    assert 0 < BAD < VOCAB_SIZE
    assert BAD not in LONG
