"""Turns of an agent: each prompt is the last one, its answer and a little more."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.engines import Run, finish, make_engine
from tests.support.models import HYBRID as HYBRID_CONFIG
from tests.support.models import LLAMA as LLAMA_CONFIG
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS

COUNT = 8
TURNS = int(os.environ.get("ZMQENGINE_AGENT_TURNS", "30"))


def turns(config: dict[str, object], count: int, turn_tokens: int) -> None:
    engine = make_engine(build_model({**config, "max_position_embeddings": 32_768}), context_tokens=32_768)
    draw = random.Random(0)
    said: list[int] = []
    for turn in range(count):
        new = [draw.randrange(VOCAB_SIZE) for _ in range(turn_tokens - COUNT)]
        before = engine.stats().prompt_tokens
        engine.insert([RowRequest(turn, said + new, COUNT)])
        run = finish(engine, Run())
        assert engine.stats().prompt_tokens - before <= len(new) + BLOCK_TOKENS, turn
        said += new + run.ids(turn)
    assert len(said) == count * turn_tokens


@pytest.mark.parametrize("config", [LLAMA_CONFIG, HYBRID_CONFIG], ids=["llama", "hybrid"])
def test_a_turn_computes_what_is_new_and_a_block_at_most(config):
    """Four turns, with caches that can be cut and with checkpoints."""
    turns(config, 4, 150)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA_CONFIG, HYBRID_CONFIG], ids=["llama", "hybrid"])
def test_so_it_is_over_thirty_turns(config):
    """Thirty turns, up to 24,000 tokens."""
    turns(config, TURNS, 800)
