"""MLX's own kernels that are compiled ahead are those that a step takes beside ours."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.cuda.test_engine_on_kernels import engine_on
from tests.support import cuda_kernels
from tests.support.engines import finish
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.load.mlx_kernels import names_for
from zmqengine.engine.models.families import read_weights

pytestmark = pytest.mark.cuda_emulated

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.95),
    Sampling(temperature=0.7, top_k=5, min_p=0.1),
    Sampling(presence_penalty=0.5),
    Sampling(repetition_penalty=1.1, temperature=0.7),
    Sampling(logit_bias={5: 2.0}, min_tokens=3),
)


class Indexing:
    """Names of MLX's kernels for gathers and scatters, as mlx/backend/cuda/indexing.cpp has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.is_off = False
        at = type(mx.zeros((1,)).at)
        taken, set_, get_at = mx.array.__getitem__, mx.array.__setitem__, at.__getitem__
        along = mx.take_along_axis

        def getitem(array: mx.array, index: Any) -> Any:
            self.note("gather_{}_{}_{}", array, index)
            return taken(array, index)

        def setitem(array: mx.array, index: Any, values: Any) -> None:
            self.note("scatter_{}_{}_Assign_{}", array, index)
            set_(array, index, values)

        def getitem_at(array: Any, index: Any) -> Any:
            # All that the engine adds to in this way are counts.
            self.note("scatter_{}_{}_Sum_{}", mx.zeros((1,)), index)
            return get_at(array, index)

        def take_along_axis(array: mx.array, index: mx.array, axis: int) -> mx.array:
            if not self.is_off:
                self.names.add(f"gather_axis_{type_of(array)}_{type_of(index)}")
            return along(array, index, axis=axis)

        monkeypatch.setattr(mx.array, "__getitem__", getitem)
        monkeypatch.setattr(mx.array, "__setitem__", setitem)
        monkeypatch.setattr(at, "__getitem__", getitem_at)
        monkeypatch.setattr(mx, "take_along_axis", take_along_axis)

    def note(self, name: str, array: mx.array, index: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        types = {type_of(part) for part in parts if isinstance(part, mx.array)}
        if self.is_off or not types:
            return
        indices = [part for part in parts if isinstance(part, mx.array | int)]
        # An index of Python is unsigned; MLX takes a type that holds all of them.
        types |= {"uint32" for part in indices if isinstance(part, int)}
        kind = types.pop() if len(types) == 1 else "int64"
        self.names.add(name.format(type_of(array), kind, len(indices)))


def type_of(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def test_what_is_gathered_and_scattered_is_compiled_ahead(
    plain_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of rows that join, sample in every way, are measured, and begin with a cached prefix."""
    model = build_model({**LLAMA, "hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2})
    model.set_dtype(mx.float16)
    indexing = Indexing(monkeypatch)

    def apart(stand_in: Any) -> Any:
        def call(*arguments: Any) -> Any:
            indexing.is_off = True
            made = stand_in(*arguments)
            indexing.is_off = False
            return made

        return call

    monkeypatch.setattr(
        cuda_kernels, "KERNELS", {name: apart(stand_in) for name, stand_in in cuda_kernels.KERNELS.items()}
    )
    engine = engine_on(read_weights(model), CudaOps())
    chance = random.Random(1)
    shared = [chance.randrange(VOCAB_SIZE) for _ in range(80)]
    for number in range(24):
        prompt = [*shared, *(chance.randrange(VOCAB_SIZE) for _ in range(10 + number))]
        request = RowRequest(
            number,
            prompt,
            4 + number % 3,
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            logprobs=2 if number % 5 == 4 else None,
        )
        assert engine.insert([request]) == []
        engine.next()
        if number % 6 == 5:
            finish(engine)
    known = {name for name in names_for("float16") if name.startswith(("gather", "scatter"))}
    # Packed weights, which this model does not have, are gathered as they are.
    assert indexing.names == known - {"gather_uint32_uint32_1"}
