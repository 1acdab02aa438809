"""Every operation that the engine sends to the device, against the same on MLX's CPU backend."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.bench.device.verdict import Verdict
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.open import find_ops
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import SAMPLED, PlainDraw

_TOLERANCES = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}
"""Relative; a few units of the type after sums of a thousand terms."""
_ALIKE_MIN = 0.9
"""Of drawn tokens: a token whose weight is next to a threshold may go either way."""
_VOCABULARY = 32_000
_WIDTH = 256
"""Small: products of half precision take a CPU seconds."""
Compute = Callable[[], mx.array]
Case = tuple[str, mx.Dtype, Compute]


def check(directory: Path) -> Iterator[Verdict]:
    """One verdict for each kind of operation, over its shapes and types."""
    yield _all("products", _products())
    yield _all("quantised products", _quantised())
    yield _all("attention", _attention())
    yield _all("norms and rotations", _norms())
    yield _all("writes of KV columns", _writes(), exact=True)
    yield _draws()


def _all(name: str, cases: Iterator[Case], *, exact: bool = False) -> Verdict:
    worst, failed, count = 0.0, [], 0
    for case, dtype, compute in cases:
        count += 1
        try:
            here, there = _on_both(compute)
        except Exception as error:  # noqa: BLE001 - an operation that raises is a finding
            failed.append(f"{case} {dtype}: {type(error).__name__}: {error}"[:300])
            continue
        error_ = float(np.linalg.norm(here - there) / max(1e-30, float(np.linalg.norm(there))))
        worst = max(worst, error_)
        if not error_ <= (0 if exact else _TOLERANCES[dtype]):
            failed.append(f"{case} {dtype}: off by {error_:.2g}")
    text = f"{count} cases, off by {worst:.2g} at the most"
    return Verdict(name, not failed, text if not failed else f"{text}; " + "; ".join(failed))


def _on_both(compute: Compute) -> tuple[np.ndarray, np.ndarray]:
    device = mx.default_device()
    here = _values(compute())
    mx.set_default_device(mx.Device(mx.cpu))
    try:
        return here, _values(compute())
    finally:
        mx.set_default_device(device)


def _values(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _random(*shape: int, dtype: mx.Dtype, salt: str = "") -> mx.array:
    seed = zlib.crc32(f"{shape}{salt}".encode())
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def _products() -> Iterator[Case]:
    for dtype in _TOLERANCES:
        # One row, few, an M5 matrix unit's 16, and a prefill chunk of no round size.
        for rows in (1, 8, 16, 100):
            yield f"{rows} rows", dtype, partial(_product, rows, dtype)


def _product(rows: int, dtype: mx.Dtype) -> mx.array:
    return _random(rows, _WIDTH, dtype=dtype) @ _random(_WIDTH, _WIDTH, dtype=dtype).T / 16


def _quantised() -> Iterator[Case]:
    for dtype in (mx.float16, mx.bfloat16):
        for bits in (4, 8):
            for rows in (1, 8, 16, 100):
                yield f"{rows} rows, {bits} bits", dtype, _quantised_product(rows, bits, dtype)


def _quantised_product(rows: int, bits: int, dtype: mx.Dtype) -> Compute:
    # Once, for both devices: another rounding of a weight is no wrong product.
    packed, scales, biases = mx.quantize(_random(_WIDTH, _WIDTH, dtype=dtype), group_size=64, bits=bits)
    mx.eval(packed, scales, biases)
    ops, _ = find_ops()

    def compute() -> mx.array:
        left = _random(rows, _WIDTH, dtype=dtype)
        if rows > ops.quantised_rows_max:
            return left @ mx.dequantize(packed, scales, biases, 64, bits).T / 16
        return mx.quantized_matmul(left, packed, scales, biases, True, 64, bits) / 16

    return compute


def _attention() -> Iterator[Case]:
    for dtype in _TOLERANCES:
        for width in (64, 128):
            for tokens, mask in ((1, "none"), (1, "rows"), (4, "rows"), (32, "causal"), (100, "causal")):
                yield (
                    f"width {width}, {tokens} tokens, mask {mask}",
                    dtype,
                    _attend(tokens, width, mask, dtype),
                )


def _attend(tokens: int, width: int, mask: str, dtype: mx.Dtype) -> Compute:
    def compute() -> mx.array:
        columns = 128
        queries = _random(3, 4, tokens, width, dtype=dtype, salt="q")
        keys, values = (_random(3, 2, columns, width, dtype=dtype, salt=salt) for salt in "kv")
        chosen: Any = None if mask == "none" else mask
        if mask == "rows":
            # Rows of unlike lengths, padded on the left, as in a batch that decodes.
            starts = mx.array([0, 17, 100])[:, None, None, None]
            until = columns - tokens + 1 + mx.arange(tokens)[:, None]
            chosen = (mx.arange(columns) >= starts) & (mx.arange(columns) < until)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=width**-0.5, mask=chosen)

    return compute


def _norms() -> Iterator[Case]:
    for dtype in _TOLERANCES:
        yield "rms_norm", dtype, partial(_norm, dtype)
        yield "rope", dtype, partial(_rotate, dtype)
        yield "softmax", dtype, partial(_softmax, dtype)


def _norm(dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(_random(5, 896, dtype=dtype), _random(896, dtype=dtype), 1e-5)


def _rotate(dtype: mx.Dtype) -> mx.array:
    rows = _random(3, 2, 7, 64, dtype=dtype)
    offsets = mx.array([0, 17, 300])
    return mx.fast.rope(rows, 64, traditional=False, base=10000.0, scale=1.0, offset=offsets)


def _softmax(dtype: mx.Dtype) -> mx.array:
    # As the engine calls it: without `precise` MLX adds 8,000 numbers in bfloat16 on a CPU, and is off by 2.6 there.
    return mx.softmax(_random(5, 8000, dtype=dtype), axis=-1, precise=True)


def _writes() -> Iterator[Case]:
    for dtype in _TOLERANCES:
        for width in (64, 80, 128):
            yield f"width {width}", dtype, partial(_write, width, dtype)


def _write(width: int, dtype: mx.Dtype) -> mx.array:
    # As slots are written: columns of unlike slots, in one assignment.
    slots = _random(3, 2, 40, width, dtype=dtype)
    slots[mx.array([0, 1, 2]), :, mx.array([7, 0, 39])] = _random(3, 2, width, dtype=dtype)
    return slots


def _draws() -> Verdict:
    """Tokens that are drawn with the same seeds; both ways to find the top_p threshold."""
    shares, ok = [], True
    for nucleus in ("search", "sort"):
        for index, sampling in enumerate(SAMPLED):
            rows = [
                Row(RowRequest(row=at, prompt=[0], max_tokens=2, sampling=sampling, seed=at), _VOCABULARY, 4)
                for at in range(32)
            ]
            here, there = _on_both(partial(_drawn, rows, nucleus))
            alike = float((here == there).mean())
            ok = ok and alike >= _ALIKE_MIN
            shares.append(f"{nucleus} {index}: {alike:.0%}")
    return Verdict("draws", ok, "the same tokens as on the CPU, " + ", ".join(shares))


def _drawn(rows: Sequence[Row], nucleus: Any) -> mx.array:
    logits = _random(len(rows), _VOCABULARY, dtype=mx.float32) * 2
    return PlainDraw(nucleus).plan(rows, _VOCABULARY).draw(logits)[0]
