"""What rows hold never passes what was projected for them, whoever joins, leaves, is parked and grows."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drafts import Self, speculator
from tests.support.engines import make_engine
from tests.support.kv_kernels import MemoryKernels
from tests.support.models import LLAMA, MAMBA, SLIDING, build_model
from zmqengine.engine.host.backend import on_cuda
from zmqengine.engine.interface import RowRequest

EXAMPLES = int(os.environ.get("ZMQENGINE_TEST_MEMORY_EXAMPLES", "3"))
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
            whole = len(request.prompt) + len(self.output[row])
            read = self.done[row] >= len(request.prompt) + len(request.emitted)
            projected += self.engine.project_bytes(whole if read else self.done[row])
        assert memory.kv <= projected + memory.padding


def prompt(length: int, seed: int) -> list[int]:
    return [(place * (seed % 17 + 2) + seed) % 300 for place in range(length)]


@pytest.mark.parametrize("shape", [*CONFIGS, pytest.param("drafting", marks=pytest.mark.slow)])
@pytest.mark.parametrize("padding_bytes_max", [0, 150_000])
@settings(max_examples=EXAMPLES, deadline=None)
@given(operations=OPERATIONS)
def test_caches_stay_within_projection_and_padding(shape, padding_bytes_max, operations):
    """At every step of a random life."""
    drafting, shape = shape == "drafting", "llama" if shape == "drafting" else shape
    if shape not in MODELS:
        MODELS[shape] = build_model(CONFIGS[shape])
    engine = make_engine(
        MODELS[shape],
        speculator=speculator(Self(MODELS[shape], padding_bytes_max)) if drafting else None,
        padding_bytes_max=padding_bytes_max,
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


@pytest.mark.skipif(on_cuda(), reason="memory of a CUDA device")
@pytest.mark.parametrize("longest", [240, 300])
def test_what_the_longest_row_leaves_is_given_back(monkeypatch, longest):
    """Empty rows and columns of a batch in place, as on a GPU, are counted, and are at most a quarter of it."""
    cuda_kernels = pytest.importorskip("tests.support.cuda_kernels", exc_type=ImportError)
    from tests.support.in_place import model_on_kernels

    cuda_kernels.stand_in(monkeypatch)
    empty = set()
    engine = make_engine(
        model_on_kernels(),
        rows_max=8,
        prompt_cache_bytes=0,
        padding_bytes_max=1 << 23,
        kernels=MemoryKernels(gpu=True),
    )
    known = Known(engine)
    known.insert(RowRequest(0, prompt(longest, 0), 9))
    while not engine.stats().rows_decoding:
        known.step()
    for row in range(1, 8):
        known.insert(RowRequest(row, prompt(10, row), 40 + (row > 1)))
    while known.requests:
        known.step()
        empty.add((len(known.requests), engine.empty_bytes))
    cuda_kernels.forget()
    row_bytes = engine.project_bytes(0)
    # Where a copy would have fewer columns, it is made.
    assert ((7, row_bytes) in empty) == (longest == 240)
    assert all(bytes_ <= rows * row_bytes / 3 for rows, bytes_ in empty)


def test_many_unlike_rows_share_one_allowance(models):
    """24 rows of 24 lengths: the padding of all batches together is bounded, not that of each."""
    allowed = 60_000
    engine = make_engine(models["llama"], padding_bytes_max=allowed, prompt_cache_bytes=0)
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
    assert 1 < len(engine._decode) < 24
