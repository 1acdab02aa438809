"""Drawing tokens on CUDA with one kernel, where the host would start some twenty."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from zmqengine.engine.kernels.kernel_text import kernel_text

_THREADS = 1024


def draw(
    logits: mx.array,
    uniforms: mx.array,
    inverse_temperature: mx.array,
    counts: mx.array | None,
    shares: mx.array | None,
    floors: mx.array | None,
) -> mx.array:
    """Tokens [rows] of `logits` [rows, vocab]; all else are columns [rows, 1], None where no row uses it.

    Of the likeliest tokens `counts` are left, of those the fewest with `shares` of the weight, and of those the ones
    whose scaled logit is not further below the best than `floors`. All three are exact.
    """
    rows = logits.shape[0]
    every, all_of_it, no_floor = _neutral()
    result: mx.array = _kernel()(
        inputs=[
            logits,
            uniforms,
            inverse_temperature,
            every if counts is None else counts,
            all_of_it if shares is None else shares,
            no_floor if floors is None else floors,
        ],
        template=[("T", logits.dtype)],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[mx.uint32],
    )[0]
    return result


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="draw_tokens",
        input_names=["logits", "uniforms", "inverse_temperature", "counts", "shares", "floors"],
        output_names=["out"],
        source=kernel_text("draw.cu"),
    )


@cache
def _neutral() -> tuple[mx.array, mx.array, mx.array]:
    """One number for all rows, which leaves out nothing."""
    return (
        mx.array([[2**31 - 1]], dtype=mx.int32),
        mx.array([[2.0]], dtype=mx.float32),
        mx.array([[-mx.inf]], dtype=mx.float32),
    )
