"""What a model cannot do together is found out at the start, and the model is served all the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.engines import finish, greedy, make_engine
from tests.support.models import LLAMA, build_model, save_model
from zmqengine.engine.host.rounding import differ_by_rounding
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.probe import probe
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


@pytest.mark.parametrize(("shape", "paddable"), [("llama", True), ("sliding", True), ("mamba", False)])
def test_padding_is_used_only_where_it_changes_nothing(models, shape, paddable):
    """mlx-lm's first Mamba takes padding for text; its rows still share a batch."""
    abilities = probe(models[shape])
    assert (abilities.mergeable, abilities.paddable) == (True, paddable)


def test_a_model_that_raises_in_a_batch_is_served_one_row_at_a_time():
    """mlx-lm 0.32.2's Gemma 2 cannot take the mask of a batch: without the probe every second request would fail."""
    model = build_model({**LLAMA, "model_type": "gemma2"})
    abilities = probe(model)
    assert not abilities.mergeable
    engine = make_engine(model)
    assert engine.rows_max == 1
    for prompt in ([5], [6, 7, 8], list(range(40))):
        engine.insert([RowRequest(0, prompt, 8)])
        assert finish(engine).ids(0) == greedy(model, prompt, 8)


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
