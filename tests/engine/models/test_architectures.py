"""Small random models of many architectures: greedy tokens are those of mlx-lm, with rows together and kept prompts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.engines import Run, finish, greedy, make_engine, step
from zmqengine.bench.models.small_models import ARCHITECTURES, VOCAB_SIZE, build_model
from zmqengine.engine.interface import RowRequest

_HEAD = [1 + place * 7 % 300 for place in range(150)]
_ROWS = [_HEAD, [*_HEAD[:140], 5, 9, 2], [3, 1, 4], [*_HEAD, 8, 8]]
_TOKENS = 8
# mlx-lm raises when rows of these are stepped together. All others share a batch.
ROW_BY_ROW = {"gemma2", "llama4"}


@functools.lru_cache(None)
def model_of(name: str) -> Any:
    return build_model(ARCHITECTURES[name])


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, "auto") for name in ARCHITECTURES),
        # What each family computes by MLX's operations is compared in test_decoder.py.
        *(
            pytest.param(name, "mlx", marks=() if place % 3 == 0 else pytest.mark.slow)
            for place, name in enumerate(ARCHITECTURES)
        ),
    ],
)
def test_rows_of_every_architecture_make_the_tokens_that_mlx_lm_makes(name: str, kernels: str) -> None:
    """Rows join while others run, where the model can batch; every model reuses prefixes of other rows and turns."""
    model = model_of(name)
    wanted = [greedy(model, prompt, _TOKENS) for prompt in _ROWS]
    engine = make_engine(model, kernels=kernels)
    assert engine.info.batchable == (name not in ROW_BY_ROW)
    run = Run()
    for turn in range(2):
        for place, prompt in enumerate(_ROWS):
            assert engine.insert([RowRequest(10 * turn + place, prompt, _TOKENS)]) == []
            for _ in range(2):
                step(engine, run)
            if engine.rows_max == 1:
                finish(engine, run)
        finish(engine, run)
        assert run.failures == []
        assert [run.ids(10 * turn + place) for place in range(len(_ROWS))] == wanted
    assert max(max(prompt) for prompt in _ROWS) < VOCAB_SIZE
    assert engine.stats().prompt_cache_entries > 0
    assert engine.stats().cached_tokens > len(_HEAD) * len(_ROWS) / 2
