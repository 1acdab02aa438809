"""Weights are dequantised as MLX does it."""

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


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (8, 128)])
@pytest.mark.parametrize("outputs", [3, 40])
def test_weights_are_dequantised(dtype: mx.Dtype, bits: int, group: int, outputs: int) -> None:
    """Also where they fill no whole block; rounded once, where MLX may round twice."""
    wide = mx.random.normal((outputs, 384), key=mx.random.key(bits)).astype(dtype)
    packed, scales, biases = mx.quantize(wide, group_size=group, bits=bits)
    got = quantised_products.dequantised(packed, scales, biases, bits, group, dtype)
    assert got.dtype == dtype
    exact = mx.dequantize(
        packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(exact.astype(dtype).astype(mx.float32))
    )
