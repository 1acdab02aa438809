"""Mixtures of experts on CUDA: four kernels behind the router's product, for any number of tokens.

MLX makes some twenty launches of it, and its products read weights without alignment, or once for each pair of token
and expert where they are quantised. Here one kernel chooses experts and orders the pairs by expert, the two products
read the weights of each chosen expert by the kernel of few_rows.cu, and one sums up.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from zmqengine.engine.cuda import plain_products, quantised_products
from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.plain_products import WARPS, Cut, few_rows_text
from zmqengine.engine.models.layers import Experts, Linear

# A lane keeps every 32nd logit of a token in registers, and a warp has a lane for each expert of a token.
_EXPERTS_MAX, _PER_TOKEN_MAX = 256, 32
_ROUTE_THREADS, _SUM_THREADS = 1024, 128
# Numbers of a tile: its expert, its first pair, and the one behind its last.
_TILE = 3


def supports(experts: Experts) -> bool:
    """Whether `mixture` supports these weights."""
    router = experts.router
    return (
        router.shares == "softmax"
        and router.bias is None
        and isinstance(router.scale, float)
        and router.scale == 1.0
        and experts.activation == "silu"
        and len(experts.gate_up) == 1
        and _fits(experts.gate_up[0])
        and _fits(experts.down)
        and router.linear.outputs <= _EXPERTS_MAX
        and router.per_token <= _PER_TOKEN_MAX
    )


def _fits(linear: Linear) -> bool:
    if linear.bias is not None:
        return False
    if not linear.bits:
        return plain_products.fits(linear.inputs, linear.dtype)
    return quantised_products.fits(linear)


def mixture(inputs: mx.array, logits: mx.array, experts: Experts) -> mx.array:
    """The outputs of the chosen experts of each token, summed by their shares: [tokens, dim].

    `inputs` [tokens, dim]; `logits` [tokens, experts], by which they are chosen. A token's result does not depend on
    the number of tokens.
    """
    (tokens, count), per_token = logits.shape, experts.router.per_token
    pairs = tokens * per_token
    cut = _cut(pairs / min(pairs, count), experts.down.bits)
    rows = 8 * cut.tiles
    tiles = pairs // rows + min(pairs, count)
    shares, _, order, table = _route(count, per_token, experts.router.normalised, rows, logits.dtype)(
        inputs=[logits],
        grid=(_ROUTE_THREADS, 1, 1),
        threadgroup=(_ROUTE_THREADS, 1, 1),
        output_shapes=[(pairs,), (pairs,), (pairs,), (tiles * _TILE,)],
    )
    (gate_up,) = experts.gate_up
    gated = _multiply(inputs, gate_up, order, table, pairs, per_token, cut, gated=True)
    made = _multiply(gated, experts.down, order, table, pairs, per_token, cut, gated=False)
    dim = made.shape[1]
    (found,) = _sum(dim, per_token, inputs.dtype)(
        inputs=[made, shares],
        grid=(-(-dim // (2 * _SUM_THREADS)) * _SUM_THREADS, tokens, 1),
        threadgroup=(_SUM_THREADS, 1, 1),
        output_shapes=[(tokens, dim)],
    )
    return found


def _cut(mean: float, bits: int) -> Cut:
    """The tiling for `mean` tokens an expert: without `bits`, the fastest on an H200 for 64 experts of 2,048 by 768."""
    if bits:
        return quantised_products.cut_of(min(quantised_products.ROWS_MAX, round(mean)))
    if mean <= 8:
        return Cut(1, 64, 2)
    return Cut(2, 32, 3) if mean <= 16 else Cut(4, 64, 2)


def _multiply(
    rows: mx.array,
    linear: Linear,
    order: mx.array,
    table: mx.array,
    pairs: int,
    per_token: int,
    cut: Cut,
    *,
    gated: bool,
) -> mx.array:
    outputs, packing = linear.outputs, (linear.bits, linear.group_size)
    weights = quantised_products.packed_arrays(linear) if linear.bits else [linear.weight]
    return _product(cut, rows.dtype, per_token, packing, gated)(
        inputs=[rows, *weights, order, table],
        grid=(-(-outputs // cut.columns) * WARPS * 32, table.shape[0] // _TILE, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(pairs, outputs // 2 if gated else outputs)],
    )[0]


@lru_cache(maxsize=64)
def _route(experts: int, per_token: int, normalised: bool, rows: int, dtype: mx.Dtype) -> Variant:
    kernel = Kernel(
        name="experts_route",
        input_names=["logits"],
        output_names=["shares", "chosen", "order", "tiles"],
        source=kernel_text("experts_route.cu"),
        header=kernel_text("tensor_cores.cuh", "experts_route.cuh"),
    )
    template = [("P", dtype), ("E", experts), ("PER", per_token), ("NORMALISED", normalised), ("ROWS", rows)]
    return kernel.variant(template, [dtype], [mx.float32, mx.int32, mx.int32, mx.int32])


@lru_cache(maxsize=64)
def _product(cut: Cut, dtype: mx.Dtype, per_token: int, packing: tuple[int, int], is_gated: bool) -> Variant:
    bits, group_size = packing
    scales = ["scales", "biases"] if bits else []
    kernel = Kernel(
        name="experts_packed_product" if bits else "experts_product",
        input_names=["x", "w", *scales, "order", "tiles"],
        output_names=["out"],
        source=few_rows_text("experts", "packed" if bits else "plain"),
        header=kernel_text("tensor_cores.cuh", "copies_ahead.cuh", "gated.cuh", *["unpack.cuh"] * bool(bits)),
        shared_memory=cut.shared_bytes(bits or 16),
    )
    template = [*cut.template(dtype, gated=is_gated), ("PER", per_token)]
    if bits:
        template += [("BITS", bits), ("GROUP", group_size)]
    weights = mx.uint32 if bits else dtype
    return kernel.variant(template, [dtype, weights, *[dtype] * len(scales), mx.int32, mx.int32], [dtype])


@lru_cache(maxsize=16)
def _sum(dim: int, per_token: int, dtype: mx.Dtype) -> Variant:
    kernel = Kernel(
        name="experts_sum",
        input_names=["made", "shares"],
        output_names=["out"],
        source=kernel_text("experts_sum.cu"),
        header=kernel_text("tensor_cores.cuh"),
    )
    template = [("P", dtype), ("D", dim), ("PER", per_token), ("THREADS", _SUM_THREADS)]
    return kernel.variant(template, [dtype, mx.float32], [dtype])
