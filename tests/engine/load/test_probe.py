"""What a model cannot do together is found out at the start, and the model is served all the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.engines import finish, greedy, make_engine, runner_of
from tests.support.models import LLAMA, build_model, save_model
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.probe import bytes_per_token, hidden_width, open_runner
from zmqengine.engine.open import open_mlx_engine


def test_rounding_of_a_logit_that_stands_out_is_not_another_text():
    """In bfloat16 numbers above 64 lie half a unit apart: on a GPU such a model was served one row at a time."""
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    logits[7] = 70.0
    rounded = logits.copy()
    rounded[7] += 0.5
    assert differ_by_rounding(logits, rounded)
    assert not differ_by_rounding(logits, np.roll(logits, 1))
    spoilt = logits.copy()
    spoilt[3] = np.nan
    assert not differ_by_rounding(logits, spoilt)
    assert not differ_by_rounding(logits[8:], np.roll(logits[8:], 1))


@pytest.mark.parametrize("shape", ["llama", "sliding", "mamba", "hybrid"])
def test_models_whose_rows_go_together_are_found(models, shape):
    """And those whose caches give the same logits once they are rebuilt of blocks."""
    runner = open_runner(models[shape])
    assert runner.batches
    assert runner.blocks is not None
    assert runner.uncacheable_reason == ""
    assert runner.blocks.is_cut_anywhere == (shape == "llama")


def test_a_model_that_raises_in_a_batch_is_served_one_row_at_a_time():
    """mlx-lm 0.32.2's Gemma 2 cannot take the mask of a batch: without the probe every second request would fail."""
    model = build_model({**LLAMA, "model_type": "gemma2"})
    runner = open_runner(model)
    assert not runner.batches
    assert runner.padding_bytes_max == 0
    engine = make_engine(model)
    assert engine.rows_max == 1
    for prompt in ([5], [6, 7, 8], list(range(40))):
        engine.insert([RowRequest(0, prompt, 8)])
        assert finish(engine).ids(0) == greedy(model, prompt, 8)


class Changed:
    """A model whose logits depend on something else."""

    def __init__(self, model, change):
        self._model = model
        self._change = change
        self.layers = model.layers

    def make_cache(self):
        return self._model.make_cache()

    def __call__(self, inputs, cache=None):
        return self._change(self._model(inputs, cache=cache), inputs, cache)


def test_a_model_whose_rows_change_each_other_is_served_one_row_at_a_time(models):
    """It raises nothing: its logits tell."""
    wrong = Changed(models["mamba"], lambda logits, inputs, cache: logits + logits[:1] * (len(inputs) > 1))
    assert not open_runner(wrong).batches
    fine = Changed(models["mamba"], lambda logits, inputs, cache: logits)
    assert open_runner(fine).batches


def test_a_model_whose_caches_cannot_be_rebuilt_is_served_without_a_prefix_cache(models):
    """Restored caches give other logits, or their parts are nothing that can be kept."""

    def counted(logits, inputs, cache):
        seen = cache[0].seen = getattr(cache[0], "seen", 0) + inputs.shape[1]
        return mx.roll(logits, seen, -1)

    runner = open_runner(Changed(models["mamba"], counted))
    assert runner.blocks is None
    assert runner.uncacheable_reason == "restored caches give other logits"


@pytest.mark.parametrize("kernels", ["auto", "mlx", "mlx-lm"])
def test_what_a_token_takes_is_measured(model, kernels):
    """More for a model of more layers; and the probe leaves nothing behind."""
    runner = runner_of(model, kernels)
    assert bytes_per_token(runner) > 0 or kernels == "auto"
    assert runner.byte_count == 0
    assert hidden_width(runner) == LLAMA["hidden_size"]
    assert runner.byte_count == 0


def test_a_model_that_raises_alone_does_not_become_an_engine(model):
    """smg #1427 review: construction failure ends the start."""

    class Broken:
        layers = model.layers

        def make_cache(self):
            return model.make_cache()

        def __call__(self, inputs, cache=None):
            raise ValueError("shapes do not fit")

    with pytest.raises(ValueError, match="shapes do not fit"):
        make_engine(Broken())


def test_that_rows_are_served_one_by_one_is_said_once(tmp_path, caplog):
    """In the log and in the facts; a model whose rows go together says so too."""
    gemma = save_model(tmp_path / "gemma", {**LLAMA, "model_type": "gemma2"})
    llama = save_model(tmp_path / "llama")
    with caplog.at_level("WARNING", logger="zmqengine.engine"):
        opened = open_mlx_engine(str(gemma))
        assert [record.message.split(":")[0] for record in caplog.records] == [
            "this model is served row by row"
        ]
        caplog.clear()
        assert opened.facts["batching"] == "row by row"
        opened.engine.close()
        opened = open_mlx_engine(str(llama))
        assert opened.facts["batching"] == "rows together"
        opened.engine.close()
    assert caplog.records == []
