"""With MLX's operations, too, slots are written where they are: peak memory would tell of a copy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.support.engines import make_engine
from tests.support.heads import head_module, headed_engine
from tests.support.models import LLAMA, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.interface import RowRequest

LAYERS = 4
ROWS = 12
PROMPT = 300
CHUNK = 128


@pytest.fixture(scope="module")
def model() -> Any:
    """Keys of one layer of all rows take more than what a step needs besides."""
    return build_model(
        {
            **LLAMA,
            "num_hidden_layers": LAYERS,
            "head_dim": 64,
            "num_key_value_heads": 2,
            "num_attention_heads": 2,
        }
    )


class Measured:
    """An engine, and what its steps take, in slots of the smallest capacity."""

    def __init__(self, model: Any, **options: Any) -> None:
        options = {"prompt_cache_bytes": 0, "rows_max": 16, **options}
        self.engine = make_engine(
            model, kernels="mlx", prefill_chunk=CHUNK, prefill_chunk_idle=CHUNK, **options
        )
        self.slot_bytes = self.engine.project_bytes(1)
        self.count = 0

    @property
    def slots(self) -> float:
        """Slots that are allocated."""
        return (self.engine.memory().kv + self.engine.trim(1 << 60)) / self.slot_bytes

    def insert(self, length: int = PROMPT, tokens: int = 500) -> None:
        prompt = [(self.count * 17 + place * 5) % 300 for place in range(length)]
        assert self.engine.insert([RowRequest(self.count, prompt, tokens)]) == []
        self.count += 1

    def step(self) -> tuple[float, float]:
        """Slots that a step takes at its peak, and slots that are allocated afterwards and were not before."""
        mx.synchronize()
        before, slots = mx.get_active_memory(), self.slots
        mx.reset_peak_memory()
        self.engine.next()
        mx.synchronize()
        return (mx.get_peak_memory() - before) / self.slot_bytes, self.slots - slots


def test_joins_prompts_and_decode_copy_no_slot(model: Any) -> None:
    """Whatever the number of rows: a step takes new slots, and less than a row besides."""
    measured = Measured(model)
    for rows in range(1, ROWS + 1):
        measured.insert()
        peaks = [measured.step() for _ in range(5)]
        (first, grown), *others = peaks
        # Keys and values of one layer are copied at a time where a pool grows.
        assert first <= grown + (measured.slots / LAYERS if grown else 0) + 1
        assert all(allocated == 0 for _, allocated in others)
        assert max(peak for peak, _ in others) <= 1
        # The prompt has been read; a row in decode takes little.
        assert max(peak for peak, _ in others[-2:]) <= 0.15
        assert measured.slots <= rows * 3 / 2
    # The measure would notice: with its keys in use elsewhere, one layer is copied.
    (pool,) = vars(measured.engine)["_runner"].slots.pools.values()
    kept = pool.keys[1]
    other = kept[:1]
    peak, _ = measured.step()
    assert peak >= ROWS / LAYERS / 2
    del other


def test_rows_that_leave_are_copied_alone(model: Any) -> None:
    """Blocks for the prefix cache are copies of one row; the steps after it write in place."""
    measured = Measured(model, prompt_cache_bytes=1 << 30)
    for row in range(ROWS):
        measured.insert(tokens=20 + 12 * row)
    while measured.engine.stats().rows_prefilling:
        measured.engine.next()
    ends = 0
    while (rows := measured.engine.stats().rows_decoding) > 4:
        peak, _ = measured.step()
        ended = measured.engine.stats().rows_decoding < rows
        ends += ended
        # A copy of a row at once, and of its parts.
        assert peak <= (2 if ended else 1)
    assert ends > 2
    # A row that begins with what is cached is copied into its slot.
    measured.insert(length=PROMPT + 5)
    measured.engine.remove([measured.count - 2])
    assert measured.step()[0] <= 2 + measured.slots / LAYERS


def test_a_row_that_outgrows_its_slot_is_copied_alone(model: Any) -> None:
    """To a slot of twice the size."""
    measured = Measured(model)
    for row in range(ROWS):
        measured.insert(length=505 if row == 3 else 40)
    while measured.engine.stats().rows_prefilling:
        measured.engine.next()
    peaks = [measured.step() for _ in range(16)]
    assert sum(grown for _, grown in peaks) == 2
    # Up to 1,024 tokens of it exist once more: these are all of the row.
    assert max(peak - grown for peak, grown in peaks) <= 1.1


def test_a_head_is_primed_and_drafts_in_place() -> None:
    """Neither verify blocks nor the draft tokens before them copy its keys, or those of a layer."""
    headed = build_model({**ARCHITECTURES["qwen3_5"], "head_dim": 128})
    engine = headed_engine(headed, head_module(headed), widths=(4,), rows_max=16, prompt_cache_bytes=0)
    requests = [RowRequest(row, [(row * 17 + at * 5) % 300 for at in range(40)], 200) for row in range(ROWS)]
    assert engine.insert(requests) == []
    while engine.stats().rows_prefilling:
        engine.next()
    engine.next()
    array_bytes = ROWS * engine.project_bytes(1) / 4

    def peak_bytes() -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        assert engine.next().drafts
        mx.synchronize()
        return mx.get_peak_memory() - before

    assert max(peak_bytes() for _ in range(4)) < array_bytes / 2
    # The measure would notice: with its keys in use elsewhere, the head's are copied.
    (pool,) = vars(engine)["_runner"].slots.pools.values()
    other = pool.keys[-1][:1]
    assert peak_bytes() > array_bytes / 2
    del other
