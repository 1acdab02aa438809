"""What rows hold never passes what was projected for them, whoever joins, leaves, is parked and grows."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drafts import Self, speculator
from tests.support.engines import Run, greedy, make_engine, runner_of, step
from tests.support.models import LLAMA, MAMBA, SLIDING, build_model
from zmqengine.engine.interface import RowRequest

EXAMPLES = int(os.environ.get("ZMQENGINE_TEST_MEMORY_EXAMPLES", "2"))
MODELS: dict[str, Any] = {}
CONFIGS = {"llama": LLAMA, "sliding": {**SLIDING, "sliding_window": 300}, "mamba": MAMBA}

LENGTHS = st.one_of(st.integers(1, 40), st.integers(200, 300), st.integers(400, 900))
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(LENGTHS, min_size=1, max_size=6), st.integers(1, 300)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("park"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("step"), st.sampled_from([1, 2, 5, 40, 270]), st.just(0)),
    ),
    min_size=3,
    max_size=14,
)


class Known:
    """What a worker knows of the rows in the engine: how many tokens each may hold."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: dict[int, RowRequest] = {}
        self.output: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self.count = 0

    def insert(self, request: RowRequest) -> None:
        assert self.engine.insert([request]) == []
        self.requests[request.row] = request
        self.output[request.row] = list(request.emitted)
        self.done[request.row] = 0
        self.count += 1

    def drop(self, row: int) -> RowRequest:
        del self.done[row]
        request = self.requests.pop(row)
        emitted = self.output.pop(row)
        return RowRequest(self.count, request.prompt, request.max_tokens, emitted)

    def step(self) -> None:
        result = self.engine.next()
        assert result.failures == []
        for prefill in result.prefills:
            if prefill.row in self.done:
                self.done[prefill.row] = prefill.done
        for token in result.tokens:
            self.output[token.row].append(token.token)
            if token.finish is not None:
                self.drop(token.row)
        self.check()

    def check(self) -> None:
        memory = self.engine.memory()
        assert memory.padding <= self.engine.padding_bytes_max
        projected = 0
        for row, request in self.requests.items():
            projected += self.engine.project_bytes(len(request.prompt) + len(self.output[row]))
        assert memory.kv <= projected + memory.padding


def prompt(length: int, seed: int) -> list[int]:
    return [(place * (seed % 17 + 2) + seed) % 300 for place in range(length)]


@pytest.mark.parametrize("shape", [*CONFIGS, pytest.param("drafting", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernels", "padding_bytes_max"), [("auto", 0), ("mlx", 0), ("mlx-lm", 0), ("mlx-lm", 150_000)]
)
@settings(max_examples=EXAMPLES, deadline=None)
@given(operations=OPERATIONS)
def test_caches_stay_within_projection_and_padding(shape, kernels, padding_bytes_max, operations):
    """At every step of a random life."""
    drafting, shape = shape == "drafting", "llama" if shape == "drafting" else shape
    if shape not in MODELS:
        MODELS[shape] = build_model(CONFIGS[shape])
    runner = runner_of(MODELS[shape], kernels)
    if kernels == "mlx-lm":
        runner.padding_bytes_max = padding_bytes_max
    engine = make_engine(
        runner,
        speculator=speculator(Self(MODELS[shape])) if drafting else None,
        prefill_chunk=256,
        prefill_chunk_idle=512,
        prompt_cache_bytes=2 << 20,
    )
    known = Known(engine)
    for name, argument, count in operations:
        if name == "insert":
            for length in argument:
                if len(known.requests) < engine.rows_max:
                    known.insert(RowRequest(known.count, prompt(length, known.count), count))
        elif name == "step":
            for _ in range(argument):
                if known.requests:
                    known.step()
        elif known.requests:
            row = list(known.requests)[argument % len(known.requests)]
            again = known.drop(row)
            if name == "remove":
                engine.remove([row])
            else:
                engine.park(row)
                known.insert(again)
        known.check()
    engine.close()


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_what_the_longest_row_leaves_is_given_back(model, kernels):
    """A pool is freed with its last row; free slots below a row in use are counted."""
    engine = make_engine(model, rows_max=8, prompt_cache_bytes=0, kernels=kernels)
    known = Known(engine)
    for row, length in enumerate((700, 10, 20, 30, 40, 1100)):
        known.insert(RowRequest(row, prompt(length, row), 4 + 4 * (row == 4)))
    while len(known.requests) > 1:
        known.step()
    slot = engine.project_bytes(1)
    memory = engine.memory()
    # Row 4 is in the fourth slot of its pool; the pools of the long rows are gone.
    assert memory.kv == slot
    assert 3 * slot <= engine.trim(1 << 60) <= 5 * slot
    while known.requests:
        known.step()
    assert engine.memory().kv == engine.trim(1 << 60) == 0


@pytest.mark.parametrize(("shape", "kernels"), [("llama", "auto"), ("llama", "mlx"), ("hybrid", "mlx")])
def test_rows_go_on_from_the_slots_they_are_moved_to(models, shape, kernels):
    """Whenever all that no row has is freed; what the rows that wait will take stays."""
    model = models[shape]
    engine = make_engine(model, rows_max=8, prompt_cache_bytes=0, kernels=kernels)
    lengths, counts = (700, 10, 20, 530, 40, 1100, 30), (4, 4, 9, 6, 30, 12, 30)
    requests = [
        RowRequest(row, prompt(length, row), count)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    assert engine.insert(requests) == []
    run, moved = Run(), 0
    while engine.stats().rows_prefilling or engine.stats().rows_decoding:
        step(engine, run)
        waiting = any(row.cache is None for row in engine._rows.values())
        before = engine.trim(1 << 60)
        assert engine.trim(0) == 0
        moved += before > 0 and not waiting
    assert moved
    assert [run.ids(row) for row in range(7)] == [
        greedy(model, request.prompt, count) for request, count in zip(requests, counts, strict=True)
    ]


def test_a_pool_grows_by_a_row_where_memory_has_no_room_for_more(model):
    """Half as many slots again are allocated ahead where it has."""
    for room, most in ((1 << 30, 5), (0, 0)):
        engine = make_engine(model, rows_max=16, prompt_cache_bytes=0, kernels="mlx")
        engine.trim(room)
        for row in range(10):
            engine.insert([RowRequest(row, prompt(10, row), 50)])
            engine.next()
        slot = engine.project_bytes(1)
        assert engine.memory().kv == 10 * slot
        assert (engine.trim(1 << 60) > 0) == (most > 0)
        assert engine.trim(1 << 60) <= most * slot
        engine.close()


def test_many_unlike_rows_share_one_allowance(models):
    """24 rows of 24 lengths: the padding of all batches together is bounded, not that of each."""
    allowed = 60_000
    runner = runner_of(models["llama"], "mlx-lm")
    runner.padding_bytes_max = allowed
    engine = make_engine(runner, prompt_cache_bytes=0)
    lengths = [12 * (row + 1) for row in range(24)]
    engine.insert([RowRequest(row, prompt(length, row), 40) for row, length in enumerate(lengths)])
    while engine.stats().rows_prefilling:
        engine.next()
        assert engine.memory().padding <= allowed
    engine.next()
    memory = engine.memory()
    assert engine.stats().rows_decoding == 24
    assert 0 < memory.padding <= allowed
    assert memory.kv <= sum(engine.project_bytes(length + 2) for length in lengths) + allowed
    # Fewer batches than rows: what is allowed is used.
    assert 1 < len(runner._batches) < 24


def test_the_prefix_cache_makes_room_for_copies_of_mlx_lms_batches(models):
    """They are copied as they grow, beyond the workspace of a start, which knows of no rows."""
    engine = make_engine(models["mamba"], rows_max=8, prompt_cache_bytes=0)
    assert engine.trim(1 << 60) == 0
    at_start = engine.memory().workspace
    for row in range(4):
        engine.insert([RowRequest(row, prompt(20, row), 9)])
        engine.next()
    assert engine.trim(1 << 60) >= engine.memory().kv > 0
    assert engine.memory().workspace == at_start + engine.trim(1 << 60)
