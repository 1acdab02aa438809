"""Quantised weights are dequantised and multiplied as they are by MLX in full width."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda_kernels import quantised, wide_of
from zmqengine.engine.cuda import quantised_products

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels_as_written")]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 64), (4, 32), (8, 128)])
@pytest.mark.parametrize("outputs", [3, 40])
def test_weights_are_dequantised(dtype: mx.Dtype, bits: int, group: int, outputs: int) -> None:
    """Also where they fill no whole block; rounded once, where MLX may round twice."""
    wide = mx.random.normal((outputs, 384), key=mx.random.key(bits)).astype(dtype)
    linear = quantised(wide, bits, group)
    got = quantised_products.dequantised(linear)
    assert got.dtype == dtype
    exact = wide_of(linear)
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(exact.astype(dtype).astype(mx.float32))
    )


@pytest.mark.parametrize(
    ("dtype", "bits", "group"),
    [(mx.bfloat16, 4, 64), (mx.float16, 8, 64), (mx.float16, 4, 32), (mx.bfloat16, 8, 128)],
)
def test_few_rows_are_multiplied(dtype: mx.Dtype, bits: int, group: int) -> None:
    """Also where outputs fill no whole block. Each of the two kernels gives a row the same bits for any number of
    rows."""
    wide = mx.random.normal((75, 384), key=mx.random.key(bits)).astype(dtype)
    linear = quantised(wide, bits, group)
    inputs = mx.random.normal((64, 384), key=mx.random.key(1)).astype(dtype)
    expected = np.array(inputs.astype(mx.float32) @ wide_of(linear).T)
    found: dict[int, np.ndarray] = {}
    for rows, other in ((1, 1), (9, 1), (30, 1), (40, 40), (64, 40)):
        product = quantised_products.few_rows(inputs[:rows], linear)
        found[rows] = np.array(product.astype(mx.float32))
        error = np.linalg.norm(found[rows] - expected[:rows]) / np.linalg.norm(expected[:rows])
        assert error < (0.005 if dtype == mx.bfloat16 else 0.001)
        np.testing.assert_array_equal(found[rows][:other], found[other])
