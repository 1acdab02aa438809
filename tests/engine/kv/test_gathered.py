"""Rows and columns of caches are the same whether they are moved number by number or in pieces."""

from __future__ import annotations

import mlx.core as mx
import pytest

from zmqengine.engine.kv.kernels import PlainKernels, in_words, take_rows


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint8])
@pytest.mark.parametrize("width", [3, 4, 16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_gathered_is_what_stands_there(dtype, width, turned, gpu):
    """In pieces of 8 bytes where the width allows it, and of arrays that do not lie in order as well."""
    whole = mx.random.randint(0, 200, (5, 3, 7, width)).astype(dtype)
    if turned:
        whole = whole.transpose(0, 2, 1, 3)
    assert (in_words(whole).dtype == mx.uint64) == (width * dtype.size % 8 == 0)
    rows = mx.array([4, 0, 0])
    assert mx.array_equal(take_rows(whole, rows), whole[rows])
    assert mx.array_equal(take_rows(whole, rows, slice(1, 3)), whole[..., 1:3, :][rows])
    order = mx.array([[2, 0, 0], [1, 1, 2], [0, 1, 2], [2, 1, 0], [0, 0, 0]])
    wanted = mx.take_along_axis(whole, order[:, None, :, None], axis=2)
    assert mx.array_equal(PlainKernels(gpu=gpu).take_columns(whole, order), wanted)
