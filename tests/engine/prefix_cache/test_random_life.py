"""Random traffic on a small prefix cache: the tokens are those of an engine without one."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from tests.support.engines import Run, finish, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.step.mlx_engine import MlxEngine

OPERATIONS = int(os.environ.get("ZMQENGINE_TEST_STORE_OPERATIONS", "60"))
BUDGET_BYTES = {"llama": 300_000, "sliding": 700_000, "mamba": 60_000, "hybrid": 300_000}
ROWS_MAX = 6


class Life:
    """An engine with a small prefix cache, and the tokens of every request."""

    def __init__(self, model: Any, bytes_max: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = make_engine(
            model, prompt_cache_bytes=bytes_max, prefill_chunk=96, prefill_chunk_idle=160, rows_max=ROWS_MAX
        )
        self.bytes_max = self.limit = bytes_max
        self.run = Run()
        self.requests: dict[int, RowRequest] = {}
        self.earlier: dict[int, list[int]] = {}
        self.texts: list[list[int]] = [self.text(150)]
        self.count = 0

    def text(self, length: int) -> list[int]:
        return [self.draw.randrange(VOCAB_SIZE) for _ in range(length)]

    def insert(self) -> None:
        """A new prompt, or one that begins like an earlier one, often at the end of a block."""
        if len(self.alive()) == ROWS_MAX:
            return
        base = self.draw.choice(self.texts[-12:]) if self.draw.random() < 0.9 else []
        cut = self.draw.choice([len(base), self.draw.randrange(len(base) + 1), len(base) // 64 * 64])
        prompt = [*base[:cut], *self.text(self.draw.choice([1, 5, 70, 200]))][:900]
        for _ in range(self.draw.choice([1, 1, 3])):
            self.add(
                RowRequest(
                    self.count,
                    prompt,
                    self.draw.choice([1, 2, 6]),
                    cache_scope=self.draw.choice(["", "", "", "other"]),
                    pin=self.draw.random() < 0.05,
                )
            )
        self.texts.append(prompt)

    def add(self, request: RowRequest) -> None:
        if len(self.alive()) < ROWS_MAX:
            assert self.engine.insert([request]) == []
            self.requests[request.row] = request
            self.count += 1

    def alive(self) -> list[int]:
        return list(self.engine._rows)

    def operate(self) -> None:
        kind = self.draw.choices(
            ["insert", "step", "remove", "park", "limit", "reset"], [5, 12, 1, 2, 1, 0.3]
        )[0]
        alive = self.alive()
        if kind == "insert":
            self.insert()
        elif kind == "step":
            for _ in range(self.draw.choice([1, 1, 2, 8])):
                step(self.engine, self.run)
                self.check()
        elif kind == "remove" and alive:
            self.engine.remove([self.draw.choice(alive)])
        elif kind == "park" and alive:
            row = self.draw.choice(alive)
            request, made = self.requests[row], self.run.ids(row)
            self.engine.park(row)
            self.add(
                RowRequest(
                    self.count, request.prompt, request.max_tokens, [*request.emitted, *made],
                    cache_scope=request.cache_scope,
                )
            )  # fmt: skip
        elif kind == "limit":
            self.limit = self.draw.choice([0, self.bytes_max // 3, self.bytes_max, self.bytes_max])
            self.engine.limit_prompt_cache(self.limit)
        elif kind == "reset":
            self.engine.reset(keep_prompts=self.draw.random() < 0.8)
        self.check()

    def check(self) -> None:
        """Counters agree with the blocks, which are within the budget."""
        memory, store = self.engine.memory(), self.engine._store
        assert memory.prompt_cache + memory.parked <= self.limit
        nodes = list(store.pool.index)
        assert sum(node.block.bytes for node in nodes) == store.pool.bytes
        pinned = [node for path in store.pool._pinned.values() for node in path]
        assert Counter({node: node.holds for node in nodes if node.holds}) == Counter(pinned)
        assert sum(node.block.bytes for node in set(pinned)) == store.pool.pinned_bytes
        assert sum(node.is_leaf for node in nodes) == store.pool.index.leaves
        assert all(node.parent is None or node.parent.is_kept for node in nodes)


def outputs(engine: MlxEngine, requests: list[RowRequest]) -> dict[int, list[int]]:
    run = Run()
    for start in range(0, len(requests), 32):
        assert engine.insert(requests[start : start + 32]) == []
        finish(engine, run)
    return {request.row: run.ids(request.row) for request in requests}


@pytest.mark.parametrize(
    "shape",
    ["llama", "hybrid", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("sliding", "mamba"))],
)
def test_the_tokens_are_those_of_an_engine_that_keeps_nothing(models, shape):
    """Rows come, are preempted and aborted; blocks are shared, evicted, pinned and accepted all the time."""
    life = Life(models[shape], BUDGET_BYTES[shape], seed=OPERATIONS)
    for _ in range(OPERATIONS):
        life.operate()
    finish(life.engine, life.run)
    life.check()
    assert life.engine.stats().cached_tokens > 0
    assert life.run.failures == []
    plain = outputs(make_engine(models[shape], prompt_cache_bytes=0), list(life.requests.values()))
    for row, expected in plain.items():
        made = life.run.ids(row)
        assert made == expected[: len(made)], row
    whole = [row for row, expected in plain.items() if life.run.ids(row) == expected]
    assert len(whole) > life.count // 3
