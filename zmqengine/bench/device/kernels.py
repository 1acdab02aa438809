"""Our kernels for Metal against MLX's operations: the same numbers, and the time of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.bench.device.verdict import Verdict
from zmqengine.engine.kv.slots import KVShape, Slots
from zmqengine.engine.metal.slot_attention import MetalAttention
from zmqengine.engine.models.attention import MlxAttention, PlacedPiece
from zmqengine.engine.models.layers import HeadShape

_TOLERANCE = 0.02
"""Relative; bfloat16 has 8 bits, and a sum of many numbers of one sign loses few."""
_REPEATS = 30


class KernelCase(NamedTuple):
    """`rows` with so many `columns` each, of which each computes `tokens` more."""

    rows: int
    columns: int
    tokens: int = 1

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.rows} rows of {self.columns} columns, {self.tokens} tokens each"


CASES = (
    KernelCase(1, 500),
    KernelCase(8, 500),
    KernelCase(32, 500),
    KernelCase(1, 8000),
    KernelCase(8, 4000),
    KernelCase(8, 500, 4),
)
# Those of Llama 8B, of Gemma 3, and of gpt_oss.
HEADS = {
    "128 dimensions": HeadShape(32, 8, 128, 128**-0.5, None, None, None, mx.bfloat16),
    "256 dimensions": HeadShape(8, 4, 256, 256**-0.5, None, None, None, mx.bfloat16),
    "sinks and a window": HeadShape(64, 8, 64, 64**-0.5, None, None, 128, mx.bfloat16, sinks=mx.zeros((64,))),
}


def check(directory: Path) -> Iterator[Verdict]:
    """A verdict for each case and kind of heads; one without figures where there is no Metal."""
    if not mx.metal.is_available():
        yield Verdict("kernels", None, "there is no Metal here")
        return
    for kind, heads in HEADS.items():
        for case in CASES if heads.dim == 128 else CASES[1:2]:
            yield _compare(f"{kind}: {case.name}", heads, case)


def _compare(name: str, heads: HeadShape, case: KernelCase) -> Verdict:
    figures, outputs = {}, []
    for figure, attention in (
        ("us of MLX's operations", MlxAttention([heads], [0])),
        ("us of the kernel", MetalAttention([heads], [0])),
    ):
        try:
            output, figures[figure] = _attend(attention, heads, case)
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile is a finding
            return Verdict(name, False, f"{figure}: {type(error).__name__}: {error}"[:300], figures)
        outputs.append(output)
    wanted, got = outputs
    error_ = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    by_mlx, by_kernel = figures.values()
    faster = "the kernel" if by_kernel < by_mlx else "MLX"
    text = f"MLX {by_mlx:.0f} us, kernel {by_kernel:.0f} us: {faster} is faster; off by {error_:.2g}"
    return Verdict(name, error_ <= _TOLERANCE, text, {**figures, "off by": error_})


def _attend(attention: MlxAttention, heads: HeadShape, case: KernelCase) -> tuple[np.ndarray, float]:
    """Attention of a step, and the microseconds of a layer of it, writes of keys and values included."""
    slots = Slots([KVShape(heads.key_heads, heads.dim, heads.dtype)], 2 * case.columns)
    tokens = case.rows * case.tokens
    pieces = [
        PlacedPiece(slots.take(case.columns + case.tokens), case.columns, case.tokens)
        for _ in range(case.rows)
    ]
    pool = pieces[0].slot.pool
    for seed, arrays in enumerate((pool.keys, pool.values)):
        arrays[0] = mx.random.normal(arrays[0].shape, heads.dtype, key=mx.random.key(seed))
    qkv = [
        mx.random.normal((tokens, count, heads.dim), heads.dtype, key=mx.random.key(3))
        for count in (heads.heads, heads.key_heads, heads.key_heads)
    ]
    mx.eval(pool.keys, pool.values, qkv)
    layout = attention.begin(pieces, tokens)
    seconds = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        output = attention.attend(layout, 0, qkv)
        mx.eval(output, pool.keys, pool.values)
        seconds.append(time.perf_counter() - started_s)
    return np.array(output.astype(mx.float32)), 1e6 * median(seconds)
