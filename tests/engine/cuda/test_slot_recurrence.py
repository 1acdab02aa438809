"""Models with recurrent layers on these kernels compute what they compute by documented operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

# It compiles functions when it is imported: before kernels stand in.
import mlx_lm.models.gated_delta  # noqa: F401
import numpy as np
import pytest

from tests.engine.models.families import FAMILY
from tests.engine.models.test_decoder import TEXTS, runner_on, steps
from tests.support.models import build_model
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.cuda.slot_recurrence import CudaRecurrence
from zmqengine.engine.load.probe import rows_of
from zmqengine.engine.models.families import read_weights
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.ops import PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner

pytestmark = pytest.mark.cuda_emulated

WIDE = {"hidden_size": 128, "head_dim": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**FAMILY["qwen3_5"], **WIDE},
    "qwen3_next": {**FAMILY["qwen3_next"], **WIDE},
    "lfm2": {**FAMILY["lfm2"], "hidden_size": 256, "block_dim": 256},
}
# float32 is rounded in the last digits; half precision in some percent of tokens where one tips.
TOLERANCES = {mx.float32: 1e-4, mx.float16: 0.1}


def weights_of(name: str, dtype: mx.Dtype) -> Any:
    model = build_model(CONFIGS[name])
    model.set_dtype(dtype)
    return read_weights(model)


def alike(got: list[np.ndarray], wanted: list[np.ndarray], dtype: mx.Dtype) -> bool:
    """But for rounding."""
    one, other = np.concatenate(got), np.concatenate(wanted)
    errors = np.linalg.norm(one - other, axis=-1) / np.linalg.norm(other, axis=-1)
    return bool(errors.max() <= TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_rows_join_draft_and_are_rolled_back(plain_kernels: list[str], name: str, dtype: mx.Dtype) -> None:
    """Prompts in pieces beside rows in decode, and verify blocks of which some tokens are rejected; with attention in
    the same trace, or by MLX."""
    weights = weights_of(name, dtype)
    wanted = steps(runner_on(weights, PlainOps()))
    assert not plain_kernels
    got = steps(runner_on(weights, CudaOps(), replays=True))
    assert alike(got, wanted, dtype)
    assert {"delta_heads", "delta_rule"} <= set(plain_kernels) or "short_conv" in plain_kernels
    assert (dtype == mx.float16) == ("attention" in plain_kernels)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_the_text_of_the_kernels_computes_a_model(kernels_as_written: None, name: str) -> None:
    """The same steps, the experts of Qwen3-Next too."""
    weights = weights_of(name, mx.float32)
    got = steps(runner_on(weights, CudaOps()), (1, 4, 1))
    assert alike(got, steps(runner_on(weights, PlainOps()), (1, 4, 1)), mx.float32)


def forward(runner: SlotRunner, row: Any, start: int, end: int, samples: int = 0) -> np.ndarray:
    """The last logits of a piece of a row, which has its tokens."""
    tokens = mx.array(row.tokens[start:end], mx.uint32)
    outputs = runner.forward([RowPiece(row, start, end - start, samples or 1)], tokens, samples or 1)
    assert outputs.logits is not None
    found = np.array(outputs.logits.astype(mx.float32))[0, -1]
    row.computed_tokens = end
    return found


def taken(runner: SlotRunner, row: Any, end: int) -> tuple[Any, Any]:
    """Blocks of the first `end` tokens of a row, and its states behind them."""
    parts, state = runner.blocks.take(row.cache, 0, [end]), runner.blocks.take_state(row.cache)
    assert state is not None
    mx.eval(parts, state[1])
    return parts, state


@pytest.mark.parametrize("ops", [PlainOps, CudaOps])
def test_a_checkpoint_is_a_copy_of_the_accepted_tokens(plain_kernels: list[str], ops: Any) -> None:
    """Of the one row of a pool, whose states the next step writes in place, and of a row with a verify block."""
    weights = weights_of("qwen3_5", mx.float32)
    runner = runner_on(weights, ops())
    (row,) = rows_of(TEXTS[:1])
    row.cache = runner.open(200)
    forward(runner, row, 0, 20)
    first = taken(runner, row, 20)
    forward(runner, row, 20, 28, samples=8)
    # Three of the block's tokens count.
    row.computed_tokens = 23
    second = taken(runner, row, 23)
    wanted = forward(runner, row, 23, 50)
    for (parts, state), end in ((first, 20), (second, 23)):
        (other,) = rows_of(TEXTS[:1])
        other.cache = runner.restore(parts, end, state, 200)
        other.computed_tokens = end
        got = forward(runner, other, end, 50)
        assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted)
        other.cache.close(is_finite=True)
    row.cache.close(is_finite=True)


def test_a_row_that_waits_keeps_its_accepted_tokens(plain_kernels: list[str]) -> None:
    """It has no token in the step after its verify block, when the pool may grow too."""
    weights = weights_of("qwen3_5", mx.float32)
    runner = runner_on(weights, CudaOps())
    assert isinstance(runner.decoder.ops.recurrence([]), CudaRecurrence)
    row, beside, new = rows_of(TEXTS[:3])
    row.cache = runner.open(200)
    forward(runner, row, 0, 20)
    forward(runner, row, 20, 28, samples=8)
    row.computed_tokens = 25
    beside.cache = runner.open(20)
    forward(runner, beside, 0, 4)
    # Behind a growth the block is applied; behind the next one a step has carried it.
    forward(runner, row, 25, 30, samples=5)
    row.computed_tokens = 27
    forward(runner, beside, 4, 5)
    new.cache = runner.open(20)
    forward(runner, new, 0, 9)
    got = forward(runner, row, 27, 50)
    (alone,) = rows_of(TEXTS[:1])
    alone.cache = runner_on(weights, PlainOps()).open(200)
    wanted = forward(runner_on(weights, PlainOps()), alone, 0, 50)
    assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted)
