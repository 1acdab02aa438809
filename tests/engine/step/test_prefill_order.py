"""Which prompts compute now: as whole prompts say, at the cost of a few keys."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.engines import make_engine
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.prefix_cache import block
from zmqengine.engine.prefix_cache.index import BlockIndex
from zmqengine.engine.row import Row
from zmqengine.engine.step import prefill_order
from zmqengine.engine.step.mlx_engine import MlxEngine

VOCAB = 50


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def picked_by_tokens(rows: Sequence[Row]) -> list[Row]:
    """With an empty prefix cache: a row waits for an older one that saves it 256 tokens, its last token apart."""
    picked: list[Row] = []
    for row in rows:
        if not any(
            older.scope == row.scope and common(older.tokens[:-1], row.tokens[:-1]) >= 256 for older in picked
        ):
            picked.append(row)
    return picked


def waiting(engine: MlxEngine) -> list[Row]:
    return engine._prompts()


@pytest.mark.parametrize("seed", range(6))
def test_a_row_waits_for_an_older_one_with_256_of_its_tokens(model, seed):
    """Wherever two prompts part: at the edge of a block and beside it, at the last token, in another scope."""
    chance = random.Random(seed)
    engine = make_engine(model, rows_max=32)
    prompts = [[chance.randrange(VOCAB) for _ in range(400)]]
    for row in range(32):
        older = chance.choice(prompts)
        turn = chance.choice([0, 64, 255, 256, 257, 319, 320, 321, len(older) - 1, len(older)])
        prompt = older[:turn] + [chance.randrange(VOCAB) for _ in range(chance.choice([0, 1, 30, 200]))]
        prompts.append(prompt or [1])
        engine.insert([RowRequest(row, prompts[-1], 3, cache_scope=chance.choice(["", "", "", "other"]))])
    rows = waiting(engine)
    assert prefill_order.pick(rows, engine._store) == picked_by_tokens(rows)


def test_prompts_that_wait_cost_nothing_while_the_cache_stays(model, monkeypatch):
    """40 prompts with a system prompt in common, and 200 cached ones that begin with it: their tokens are compared
    once, and again where a block was added."""
    chance = random.Random(1)
    system = [chance.randrange(VOCAB) for _ in range(300)]
    engine = make_engine(model, rows_max=64)
    store = engine._store

    def ask(row: int, length: int) -> None:
        prompt = system + [chance.randrange(VOCAB) for _ in range(length)]
        assert engine.insert([RowRequest(row, prompt, 2)]) == []

    for row in range(6):
        ask(row, 30)
    while engine._rows:
        engine.next()
    for row in range(100, 140):
        ask(row, chance.randrange(400, 900))
    compared: list[int] = []
    shared_tokens, match = block.shared_tokens, BlockIndex.match
    monkeypatch.setattr(
        block,
        "shared_tokens",
        lambda first, second: compared.append(min(len(first), len(second))) or shared_tokens(first, second),
    )
    looked: list[int] = []
    monkeypatch.setattr(BlockIndex, "match", lambda *args: looked.append(1) or match(*args))
    rows = waiting(engine)
    assert prefill_order.pick(rows, store) == rows
    assert len(looked) == 40
    del looked[:], compared[:]
    assert prefill_order.pick(rows, store) == rows
    assert (looked, compared) == ([], [])
    engine.next()
    del looked[:], compared[:]
    # One of them is read: each of the others is looked up again, and compared with no more than a block of an offer.
    prefill_order.pick(waiting(engine), store)
    assert len(looked) <= 40
    assert max(compared, default=0) <= block.BLOCK_TOKENS


def test_what_is_known_of_a_prefix_follows_the_cache(model):
    """Offers, offers withdrawn, valid blocks, and blocks that are gone."""
    engine = make_engine(model, prompt_cache_bytes=1 << 30)
    store = engine._store
    prompt = [token % VOCAB for token in range(3, 303)]
    engine.insert([RowRequest(0, prompt, 20)])
    follower = Row(RowRequest(1, [*prompt, 1, 2, 3], 2), 100, 4096)
    assert store.prefix(follower)[1:] == (0, 0)
    engine.next()
    # Its last token is computed by whoever samples from it.
    assert store.prefix(follower)[1:] == (299, 0)
    for _ in range(3):
        engine.next()
    offer = store.offer(engine._rows[0])
    assert offer is not None
    assert store.prefix(follower)[1:] == (299, 300)
    store.withdraw(offer)
    assert store.prefix(follower)[1:] == (299, 0)
    store.accept(store.offer(engine._rows[0]))
    assert store.prefix(follower)[1:] == (300, 0)
    engine.limit_prompt_cache(0)
    assert store.prefix(follower)[1:] == (0, 0)
