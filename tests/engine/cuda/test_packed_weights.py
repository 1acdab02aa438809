"""Quantised weights are dequantised and multiplied as they are by MLX in full width."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.support.cuda_kernels import quantised, wide_of
from zmqengine.engine.cuda import quantised_products

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels_as_written")]


PACKED = [
    (mx.bfloat16, 4, 64, "affine"),
    (mx.float16, 8, 64, "affine"),
    (mx.float16, 4, 32, "affine"),
    (mx.bfloat16, 8, 128, "affine"),
    (mx.bfloat16, 4, 32, "mxfp4"),
]


@pytest.mark.parametrize(("dtype", "bits", "group", "mode"), PACKED)
@pytest.mark.parametrize("outputs", [3, 40])
def test_weights_are_dequantised(dtype: mx.Dtype, bits: int, group: int, mode: str, outputs: int) -> None:
    """Also where they fill no whole block; rounded once, where MLX may round twice."""
    wide = spread(outputs, 384).astype(dtype)
    linear = quantised(wide, bits, group, mode)
    got = quantised_products.dequantised(linear)
    assert got.dtype == dtype
    exact = wide_of(linear)
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(exact.astype(dtype).astype(mx.float32))
    )


@pytest.mark.parametrize("inputs", [384, 192])
@pytest.mark.parametrize(("dtype", "bits", "group", "mode"), PACKED)
def test_few_rows_are_multiplied(dtype: mx.Dtype, bits: int, group: int, mode: str, inputs: int) -> None:
    """Also where outputs fill no whole block, or inputs no step of a warp. Each of the two kernels gives a row the same
    bits for any number of rows."""
    if inputs % group:
        pytest.skip("not quantised so")
    bias = mx.random.normal((75,), key=mx.random.key(3)).astype(dtype) if bits == 4 else None
    linear = quantised(spread(75, inputs).astype(dtype), bits, group, mode, bias)
    assert quantised_products.fits(linear)
    rows = mx.random.normal((64, inputs), key=mx.random.key(1)).astype(dtype)
    expected = np.array(rows.astype(mx.float32) @ wide_of(linear).astype(mx.float32).T)
    if bias is not None:
        expected += np.array(bias.astype(mx.float32))
    found: dict[int, np.ndarray] = {}
    for count, other in ((1, 1), (9, 1), (30, 1), (40, 40), (64, 40)):
        product = quantised_products.few_rows(rows[:count], linear)
        found[count] = np.array(product.astype(mx.float32))
        error = np.linalg.norm(found[count] - expected[:count]) / np.linalg.norm(expected[:count])
        assert error < (0.005 if dtype == mx.bfloat16 else 0.001)
        np.testing.assert_array_equal(found[count][:other], found[other])


def spread(outputs: int, inputs: int) -> mx.array:
    """Weights of unlike sizes, so that scales of groups are unlike."""
    sizes = mx.power(2.0, mx.arange(inputs) // 32 % 7 - 3.0)
    return mx.random.normal((outputs, inputs), key=mx.random.key(inputs)) * sizes
