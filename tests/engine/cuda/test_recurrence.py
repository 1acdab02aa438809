"""Rows with recurrent layers in slots: steps, and slots behind them, are those of the documented operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda_on_cpu import memory
from zmqengine.engine.cuda import recurrence
from zmqengine.engine.cuda.recurrence import RecurrentPiece
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.models.recurrence import (
    DeltaShape,
    DeltaState,
    DeltaWeights,
    delta_layer,
    short_conv,
)

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels")]

# And the type of the norm's weight and of `dt_bias`.
SHAPES = {
    "float32": (DeltaShape(2, 4, 64, 64, 4, mx.float32), mx.float32),
    "float16": (DeltaShape(1, 3, 128, 64, 4, mx.float16), mx.float16),
    "float16, and weights in float32": (DeltaShape(1, 2, 64, 64, 4, mx.float16), mx.float32),
    "large heads": (DeltaShape(1, 1, 256, 256, 3, mx.float32), mx.float32),
}
# Sums of float32 products in another order; float16 rounds at one part in 2,048, several times in a row.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-2}
SLOTS = 5


@dataclass(frozen=True)
class Step:
    """Tokens of a row in its slot; `accepted` of its verify block before are kept."""

    slot: int
    count: int
    accepted: int = 0
    is_draft: bool = False


STEPS = {
    "decode": [[Step(0, 9), Step(3, 2)], [Step(3, 1), Step(0, 1)], [Step(0, 1), Step(3, 1), Step(1, 1)]],
    "prompts of unlike lengths": [
        [Step(2, 70), Step(0, 1), Step(1, 17), Step(4, 3)],
        [Step(1, 40), Step(2, 8), Step(4, 1)],
        [Step(4, 1), Step(2, 1), Step(1, 1)],
    ],
    "a row that begins with drafts": [
        [Step(0, 5, is_draft=True), Step(1, 3)],
        [Step(0, 2, accepted=4, is_draft=True), Step(1, 1)],
        [Step(0, 1), Step(1, 1)],
    ],
    "drafts, some of them rejected": [
        [Step(0, 12), Step(1, 1), Step(2, 5)],
        [Step(1, 4, is_draft=True), Step(0, 8, is_draft=True), Step(2, 3, is_draft=True)],
        [Step(0, 3, accepted=8, is_draft=True), Step(1, 1, accepted=2), Step(2, 1)],
        [Step(1, 30), Step(0, 1, accepted=1), Step(2, 2, is_draft=True)],
        # A row that is parked has accepted tokens alone.
        [Step(2, 0, accepted=2), Step(1, 1)],
    ],
}


def new_rows(shape: DeltaShape, rows: int) -> DeltaState:
    """Rows before their first token."""
    return DeltaState(*(mx.zeros((rows, *each.shape), each.dtype) for each in shape.state_shapes))


class Rows:
    """The rows of a layer, in slots and by documented operations."""

    def __init__(self, shape: DeltaShape, wide: mx.Dtype) -> None:
        mx.random.seed(3)
        self.shape, dtype = shape, shape.dtype
        self.weights = DeltaWeights(
            (mx.random.normal((shape.channels, shape.kernel)) * 0.5).astype(dtype),
            mx.log(mx.random.uniform(0.1, 8, (shape.value_heads,))),
            mx.random.uniform(-3, 1, (shape.value_heads,)).astype(wide),
            mx.random.uniform(0.5, 2, (shape.value_dim,)).astype(wide),
            1e-6,
        )
        # A slot may have anything before the first tokens of a row.
        self.windows, self.states = (
            mx.full(each.shape, float("nan"), each.dtype) for each in new_rows(shape, SLOTS)
        )
        mx.eval(self.windows, self.states, self.weights)
        self.rows = [new_rows(shape, 1) for _ in range(SLOTS)]
        self.written: set[int] = set()
        self.kept = [mx.zeros((1, 0, shape.outputs), dtype) for _ in range(SLOTS)]
        self.product = mx.zeros((1, shape.outputs), dtype)
        self.begins: dict[int, int] = {}

    def run(self, steps: Sequence[Step]) -> tuple[mx.array, mx.array]:
        """Outputs of a step by the kernels, and what they ought to be."""
        total = sum(step.count for step in steps)
        tokens = few_sizes(total) + 3
        product = mx.random.normal((tokens, self.shape.outputs)).astype(self.shape.dtype)
        pieces, begins, outputs, begin = [], {}, [], 0
        for step in steps:
            slot, count, accepted, is_draft = step.slot, step.count, step.accepted, step.is_draft
            kept = self.begins.get(slot, 0), accepted
            pieces.append(RecurrentPiece(slot, count, *kept, slot not in self.written, is_draft))
            if accepted or not is_draft:
                self.written.add(slot)
            outputs.append(self.wanted(product[None, begin : begin + count], pieces[-1]))
            begins[slot] = begin
            begin += count
        kind, shared = recurrence.tables(pieces, tokens, self.product.shape[0])
        got = recurrence.delta_layer(
            self.shape,
            self.weights,
            kind,
            product,
            self.product,
            self.windows[:1],
            self.states[:1],
            *shared,
        )
        mx.eval(got)
        self.product, self.begins = product, begins
        return got, mx.concatenate([*outputs, mx.zeros((tokens - total, self.shape.values))])

    def wanted(self, product: mx.array, piece: RecurrentPiece) -> mx.array:
        """Outputs of a piece; its row is afterwards as the slot has to be."""
        slot, kept = piece.slot, self.kept[piece.slot][:, : piece.kept_count]
        if piece.kept_count:
            _, self.rows[slot] = delta_layer(self.shape, self.weights, kept, self.rows[slot])
        if not piece.count:
            return mx.zeros((0, self.shape.values))
        outputs, after = delta_layer(self.shape, self.weights, product, self.rows[slot])
        if not piece.is_draft:
            self.rows[slot] = after
        self.kept[slot] = product
        return outputs[0]


def error(got: mx.array, wanted: mx.array) -> float:
    """The relative error; NaN if a number is NaN."""
    one, other = (np.array(each.astype(mx.float32)) for each in (got, wanted))
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-9))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_layer_is_that_of_documented_operations(steps: list[list[Step]], name: str) -> None:
    """Outputs, zeros of the padding, and windows and states of all rows."""
    rows = Rows(*SHAPES[name])
    tolerance = TOLERANCES[rows.shape.dtype]
    for step in steps:
        got, wanted = rows.run(step)
        assert error(got, wanted) < tolerance
        assert not np.array(got[sum(each.count for each in step) :]).any()
        for slot in rows.written:
            row = rows.rows[slot]
            assert mx.array_equal(rows.windows[slot : slot + 1], row.window)
            assert error(rows.states[slot : slot + 1], row.state) < tolerance


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_short_convolution_is_that_of_documented_operations(has_bias: bool) -> None:
    """More channels than a thread block has threads; windows are written in place, behind rejected drafts too."""
    channels, kernel, dtype = 200, 3, mx.float16
    mx.random.seed(5)
    weight = mx.random.normal((channels, kernel)).astype(dtype)
    bias = mx.random.normal((channels,)).astype(dtype) if has_bias else None
    windows = mx.full((SLOTS, kernel - 1, channels), float("nan"), dtype)
    written: set[int] = set()
    mx.eval(windows, weight)
    rows = [mx.zeros((1, kernel - 1, channels), dtype) for _ in range(SLOTS)]
    before = mx.zeros((1, 3 * channels), dtype)
    begins: dict[int, int] = {}
    kept: dict[int, mx.array] = {}
    for steps in STEPS["drafts, some of them rejected"] + STEPS["prompts of unlike lengths"]:
        total = sum(step.count for step in steps)
        product = mx.random.normal((total + 2, 3 * channels)).astype(dtype)
        pieces, outputs, begin = [], [], 0
        for step in steps:
            slot, count, accepted, is_draft = step.slot, step.count, step.accepted, step.is_draft
            pieces.append(
                RecurrentPiece(slot, count, begins.get(slot, 0), accepted, slot not in written, is_draft)
            )
            if accepted or not is_draft:
                written.add(slot)
            if accepted:
                _, rows[slot] = short_conv(kept[slot][:, :accepted], rows[slot], weight, bias)
            own = product[None, begin : begin + count]
            made, after = short_conv(own, rows[slot], weight, bias)
            outputs.append(made[0])
            rows[slot] = rows[slot] if is_draft else after
            kept[slot], begins[slot] = own, begin
            begin += count
        _, shared = recurrence.tables(pieces, total + 2, before.shape[0])
        got = recurrence.short_conv(weight, bias, product, before, windows[:1], *shared)
        assert error(got[:total], mx.concatenate(outputs)) < 1e-3
        assert not np.array(got[total:]).any()
        for slot in written:
            assert np.array_equal(memory(windows)[slot], np.array(rows[slot])[0])
        before = product


@pytest.mark.parametrize(
    ("shape", "is_supported"),
    [
        (DeltaShape(16, 32, 128, 128, 4, mx.bfloat16), True),
        (DeltaShape(16, 32, 192, 128, 4, mx.bfloat16), False),
        (DeltaShape(16, 32, 128, 32, 4, mx.bfloat16), False),
        (DeltaShape(16, 32, 128, 128, 10, mx.bfloat16), False),
        (DeltaShape(16, 32, 128, 128, 4, mx.float16), False),
    ],
)
def test_heads_that_fill_warps_are_supported(shape: DeltaShape, is_supported: bool) -> None:
    """With weights of the type of the inputs, or of float32 where models have such; others are left to MLX."""
    conv, wide = mx.zeros((shape.channels, shape.kernel), mx.bfloat16), mx.zeros((32,))
    weights = DeltaWeights(conv, wide, wide, wide, 1e-6)
    assert recurrence.supports_delta(shape, weights) is is_supported
