"""Mixtures of experts on CUDA: four kernels behind the router's product, for any number of tokens.

MLX makes some twenty launches of it, and its products read weights without alignment, or once for each pair of token
and expert where they are quantised. Here one kernel chooses experts and orders the pairs by expert, the two products
read the weights of each chosen expert by the kernel of few_rows.cu, and one sums up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda import plain_products, quantised_products
from zmqengine.engine.cuda.between_products import bits_of
from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.plain_products import WARPS, Cut, few_rows_text
from zmqengine.engine.models.layers import Experts, Linear, Router

# A lane keeps every 32nd logit of a token in registers, and a warp has a lane for each expert of a token.
_EXPERTS_MAX, _PER_TOKEN_MAX = 512, 32
_ROUTE_THREADS, _SUM_THREADS = 1024, 128
# Numbers of a tile: its expert, its first pair, and the one behind its last.
_TILE = 3


def supports(experts: Experts) -> bool:
    """Whether `mixture` supports these weights, for inputs of their type."""
    router = experts.router
    return (
        experts.activation in plain_products.ACTIVATIONS
        and len(experts.gate_up) == 1
        and _fits(experts.gate_up[0])
        and _fits(experts.down)
        and experts.gate_up[0].dtype == experts.down.dtype
        and router.linear.outputs <= _EXPERTS_MAX
        and router.per_token <= _PER_TOKEN_MAX
        and router.groups == 1
    )


def _fits(linear: Linear) -> bool:
    return (
        quantised_products.fits(linear) if linear.bits else plain_products.fits(linear.inputs, linear.dtype)
    )


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
    shares, order, table = _routed(logits, experts.router, rows, tiles)
    (gate_up,) = experts.gate_up
    ordered = _Pairs(pairs, order, table, per_token)
    gated = _multiply(inputs, gate_up, ordered, cut, experts.activation)
    made = _multiply(gated, experts.down, ordered, cut, "")
    dim = made.shape[1]
    (found,) = _sum(dim, per_token, inputs.dtype)(
        inputs=[made, shares],
        grid=(-(-dim // (2 * _SUM_THREADS)) * _SUM_THREADS, tokens, 1),
        threadgroup=(_SUM_THREADS, 1, 1),
        output_shapes=[(tokens, dim)],
    )
    return found


def _routed(logits: mx.array, router: Router, rows: int, tiles: int) -> tuple[mx.array, mx.array, mx.array]:
    """The shares of the pairs of token and expert, the order of pairs by expert, and tiles of at most `rows` of one."""
    pairs = logits.shape[0] * router.per_token
    # The logits stand for what the router does not have.
    bias = logits if router.bias is None else router.bias
    scales = router.scale if isinstance(router.scale, mx.array) else logits
    shares, _, order, table = _route(_route_kind(logits, router), rows)(
        inputs=[logits, bias, scales],
        grid=(_ROUTE_THREADS, 1, 1),
        threadgroup=(_ROUTE_THREADS, 1, 1),
        output_shapes=[(pairs,), (pairs,), (pairs,), (tiles * _TILE,)],
    )
    return shares, order, table


def _cut(mean: float, bits: int) -> Cut:
    """The tiling for `mean` tokens an expert: without `bits`, the fastest on an H200 for 64 experts of 2,048 by 768."""
    if bits:
        return quantised_products.cut_of(min(quantised_products.ROWS_MAX, round(mean)))
    if mean <= 8:
        return Cut(1, 64, 2)
    return Cut(2, 32, 3) if mean <= 16 else Cut(4, 64, 2)


class _Pairs(NamedTuple):
    """A number of pairs of token and expert, `per_token` of each, ordered by expert, and tiles of them."""

    number: int
    order: mx.array
    tiles: mx.array
    per_token: int


def _multiply(rows: mx.array, linear: Linear, pairs: _Pairs, cut: Cut, activation: str) -> mx.array:
    outputs, packing = linear.outputs, quantised_products.Packing.of(linear) if linear.bits else None
    weights = quantised_products.packed_arrays(linear) if linear.bits else [linear.weight]
    bias = rows if linear.bias is None else linear.bias
    kind = _ProductKind(
        rows.dtype, pairs.per_token, packing, activation, None if linear.bias is None else bias.dtype
    )
    return _product(cut, kind)(
        inputs=[rows, *weights, bias, pairs.order, pairs.tiles],
        grid=(-(-outputs // cut.columns) * WARPS * 32, pairs.tiles.shape[0] // _TILE, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(pairs.number, outputs // 2 if activation else outputs)],
    )[0]


class _RouteKind(NamedTuple):
    """A router as the kernel is compiled for it."""

    logits: mx.Dtype
    experts: int
    per_token: int
    is_sigmoid: bool
    is_normalised: bool
    bias: mx.Dtype | None
    scales: mx.Dtype | None
    scale: float


def _route_kind(logits: mx.array, router: Router) -> _RouteKind:
    return _RouteKind(
        logits.dtype,
        logits.shape[1],
        router.per_token,
        router.shares == "sigmoid",
        # A softmax over the chosen ones is one over all, normalised.
        router.normalised or router.shares == "chosen",
        None if router.bias is None else router.bias.dtype,
        router.scale.dtype if isinstance(router.scale, mx.array) else None,
        1.0 if isinstance(router.scale, mx.array) else router.scale,
    )


@lru_cache(maxsize=64)
def _route(kind: _RouteKind, rows: int) -> Variant:
    kernel = Kernel(
        name="experts_route",
        input_names=["logits", "bias", "scales"],
        output_names=["shares", "chosen", "order", "tiles"],
        source=kernel_text("experts_route.cu"),
        header=kernel_text("experts_route.cuh"),
    )
    template = [
        ("P", kind.logits),
        ("E", kind.experts),
        ("PER", kind.per_token),
        ("SIGMOID", kind.is_sigmoid),
        ("NORMALISED", kind.is_normalised),
        ("BIASED", kind.bias is not None),
        ("SCALED", kind.scales is not None),
        ("SCALE", bits_of(kind.scale)),
        ("ROWS", rows),
    ]
    inputs = [kind.logits, kind.bias or kind.logits, kind.scales or kind.logits]
    return kernel.variant(template, inputs, [mx.float32, mx.int32, mx.int32, mx.int32])


class _ProductKind(NamedTuple):
    """A product of experts as the kernel is compiled for it."""

    dtype: mx.Dtype
    per_token: int
    packing: quantised_products.Packing | None
    activation: str
    bias: mx.Dtype | None


@lru_cache(maxsize=64)
def _product(cut: Cut, kind: _ProductKind) -> Variant:
    packing, dtype = kind.packing, kind.dtype
    scales = ["scales", "biases"] if packing else []
    kernel = Kernel(
        name="experts_packed_product" if packing else "experts_product",
        input_names=["x", "w", *scales, "output_bias", "order", "tiles"],
        output_names=["out"],
        source=few_rows_text("experts", "packed" if packing else "plain"),
        header=kernel_text(
            "tensor_cores.cuh", "copies_ahead.cuh", "gated.cuh", *["unpack.cuh"] * bool(packing)
        ),
        shared_memory=cut.shared_bytes(packing.bits if packing else 16),
    )
    template = [
        *cut.template(dtype, kind.activation, biased=kind.bias is not None),
        ("PER", kind.per_token),
        *(packing.template if packing else []),
    ]
    weights = packing.arrays if packing else [dtype]
    return kernel.variant(template, [dtype, *weights, kind.bias or dtype, mx.int32, mx.int32], [dtype])


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
