"""Quantised weights are dequantised and multiplied as they are by MLX in full width."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests.support import cuda_kernels, cuda_on_cpu
from zmqengine.engine.cuda import quantised_products
from zmqengine.engine.host.backend import on_cuda


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel on CUDA; elsewhere its text on the CPU."""
    if on_cuda():
        yield
        return
    if not cuda_on_cpu.COMPILER:
        pytest.skip("g++ is not installed")
    cuda_kernels.stand_in(monkeypatch, as_written=True)
    yield
    monkeypatch.undo()
    cuda_kernels.forget()


def wide_of(packed: mx.array, scales: mx.array, biases: mx.array, bits: int, group: int) -> mx.array:
    """The weights in float32."""
    given = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(packed, *given, group_size=group, bits=bits)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (8, 128)])
@pytest.mark.parametrize("outputs", [3, 40])
def test_weights_are_dequantised(dtype: mx.Dtype, bits: int, group: int, outputs: int) -> None:
    """Also where they fill no whole block; rounded once, where MLX may round twice."""
    wide = mx.random.normal((outputs, 384), key=mx.random.key(bits)).astype(dtype)
    packed, scales, biases = mx.quantize(wide, group_size=group, bits=bits)
    got = quantised_products.dequantised(packed, scales, biases, bits, group, dtype)
    assert got.dtype == dtype
    exact = wide_of(packed, scales, biases, bits, group)
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(exact.astype(dtype).astype(mx.float32))
    )


@pytest.mark.parametrize(
    ("dtype", "bits", "group"),
    [(mx.bfloat16, 4, 64), (mx.float16, 8, 64), (mx.float16, 4, 32), (mx.bfloat16, 8, 128)],
)
def test_few_rows_are_multiplied(dtype: mx.Dtype, bits: int, group: int) -> None:
    """Also where outputs fill no whole block; and a row gets the same to the last bit, whoever is beside it, by each of
    the two kernels."""
    wide = mx.random.normal((75, 384), key=mx.random.key(bits)).astype(dtype)
    packed, scales, biases = mx.quantize(wide, group_size=group, bits=bits)
    weights = wide_of(packed, scales, biases, bits, group)
    inputs = mx.random.normal((64, 384), key=mx.random.key(1)).astype(dtype)
    expected = np.array(inputs.astype(mx.float32) @ weights.T)
    found: dict[int, np.ndarray] = {}
    for rows, other in ((1, 1), (9, 1), (30, 1), (40, 40), (64, 40)):
        product = quantised_products.few_rows(inputs[:rows], packed, scales, biases, bits, group)
        found[rows] = np.array(product.astype(mx.float32))
        error = np.linalg.norm(found[rows] - expected[:rows]) / np.linalg.norm(expected[:rows])
        assert error < (0.005 if dtype == mx.bfloat16 else 0.001)
        np.testing.assert_array_equal(found[rows][:other], found[other])
