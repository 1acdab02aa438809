"""Sums and norms between products are those of MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine.cuda import between_products
from zmqengine.engine.cuda.cuda_ops import CudaOps
from zmqengine.engine.models.layers import Norm
from zmqengine.engine.models.ops import PlainOps

pytestmark = [pytest.mark.cuda_emulated, pytest.mark.usefixtures("kernels_as_written")]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(1, 64), (15, 896), (2, 5124)])
@pytest.mark.parametrize("is_normed", [False, True], ids=["a sum", "a sum with a normed term"])
def test_a_product_is_added_and_normed(dtype: mx.Dtype, tokens: int, dim: int, is_normed: bool) -> None:
    """The sum to the last bit, and the norms as MLX computes them."""
    residual, added, *weights = (
        mx.random.normal((tokens, dim) if seed < 2 else (dim,), key=mx.random.key(seed)).astype(dtype)
        for seed in range(4)
    )
    norm, added_norm = Norm(weights[0], 1e-5), Norm(weights[1], 1e-2) if is_normed else None
    # As in Gemma 4.
    scale = mx.array([0.375], dtype) if is_normed else None
    got = between_products.add_and_norm(residual, 3 * added, norm, added_norm, scale)
    wanted = PlainOps().add_and_norm(residual, 3 * added, norm, added_norm, scale)
    exact = 1e-6 if dtype == mx.float32 or not is_normed else 0.01
    for one, other, bound in zip(got, wanted, (exact, max(exact, 0.005)), strict=True):
        first, second = (np.array(array.astype(mx.float32)) for array in (one, other))
        assert np.linalg.norm(first - second) / np.linalg.norm(second) < bound


def test_weights_of_another_type_are_left_to_mlx() -> None:
    """Weights of the norm of the sum, or of that of the added states."""
    residual, added = (mx.ones((2, 64), mx.bfloat16) for _ in range(2))
    norm, other = Norm(mx.ones((64,), mx.bfloat16), 1e-5), Norm(mx.ones((64,)), 1e-5)
    total, _ = CudaOps().add_and_norm(residual, added, norm, other)
    assert total.dtype == mx.float32
