"""`Ops` of a decoder layer on CUDA: products by kernels of ours where they are faster, and few kernels between them.

Between two products of a layer stands a norm, or heads are rotated. Either is one kernel, with the sums and copies
around it: the host starts half as many, and it is the host that short steps wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.cuda import attention, between_products, plain_products, quantised_products
from zmqengine.engine.cuda.between_products import rotates
from zmqengine.engine.models.ops import Made, PlainOps, Product, multiply_unpacked, product
from zmqengine.engine.models.weights import HeadShape, Linear, Norm

PACKED_ROWS_MAX = 7
"""Above so many rows MLX's product with packed weights is compiled first, which takes up to half a minute a size."""

ROWS = (8, 16, 32)
"""Numbers of rows at which products with weights in half precision are measured; more of them go through cuBLAS."""

_LOSS_MAX = 1.05
# The kernel for norms reads so many numbers at once.
_FOUR = 4


class CudaOps(PlainOps):
    """`Ops` with the kernels of this folder."""

    def __init__(self) -> None:
        super().__init__(PACKED_ROWS_MAX)

    def add_and_norm(self, hidden: mx.array, added: mx.array, norm: Norm) -> tuple[mx.array, mx.array]:
        """See `Ops`."""
        if norm.weight.size % _FOUR or norm.weight.dtype != hidden.dtype:
            return super().add_and_norm(hidden, added, norm)
        return between_products.add_and_norm(hidden, added, norm.weight, norm.eps)

    def gated(self, inputs: mx.array, gate_up: tuple[Linear, ...]) -> mx.array:
        """See `PlainOps`. With one kernel for the product and what follows it."""
        linear = gate_up[0]
        is_bare = len(gate_up) == 1 and self._is_bare(linear, inputs)
        if is_bare and self._variant(linear, inputs.shape[0]) is few_rows:
            return plain_products.few_rows(inputs, linear.weight, gated=True)
        return super().gated(inputs, gate_up)

    def turn(self, product: mx.array, heads: HeadShape, offset: mx.array | int, rows: int) -> Made:
        """See `Ops`. Where one kernel rotates heads, that is left to `attend`: it writes keys in place where it can."""
        return (product,) if rotates(heads) else super().turn(product, heads, offset, rows)

    def mask(self, cache: Any, width: int, window: int | None) -> Any:
        """See `Ops`. `kv.Spans`, for the kernel that needs no mask."""
        if window is not None:
            return super().mask(cache, width, window)
        if type(cache) is kv.RaggedKVCache:
            return cache.layout.spans()
        columns = cache.offset + width
        as_mask = partial(super().mask, cache, width, window)
        return kv.Spans(_place(0), columns, _place(columns), None, as_mask)

    def attend(self, made: Made, heads: HeadShape, offset: mx.array | int, cache: Any, mask: Any) -> mx.array:
        """See `Ops`.

        Keys and values are written in place where the cache allows it; see the theory in `zmqengine.engine.kv`.
        """
        if len(made) == 1:
            (product,) = made
            places = offset if isinstance(offset, mx.array) else _place(offset)
            width = product.shape[-2] // places.shape[0]
            if type(cache) is kv.RaggedKVCache and cache.can_write_here(width, heads.dtype):
                queries = between_products.rotate_into(
                    heads, product, places, width, cache.keys, cache.values, mask.stop
                )
                begins = cache.wrote_in_place()
                attended = attention.ragged_attention(queries, cache.keys, cache.values, mask, heads.scale)
                if begins:
                    kv.start(attended)
                return attended
            made = between_products.rotate(heads, product, places, width)
        queries, keys, values = made
        if isinstance(mask, kv.Spans) and attention.fits(queries, keys):
            # The kernel knows where the columns end: none need be cut off.
            if type(cache) is kv.RaggedKVCache:
                cache.write(keys, values)
            else:
                cache.update_and_fetch(keys, values)
            return attention.ragged_attention(queries, cache.keys, cache.values, mask, heads.scale)
        keys, values = cache.update_and_fetch(keys, values)
        if isinstance(mask, kv.Spans):
            mask = mask.as_mask()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=heads.scale, mask=mask)

    def variants(self, linear: Linear, rows: int) -> Mapping[str, Product]:
        """See `Ops`."""
        found = dict(super().variants(linear, rows))
        if linear.bits:
            fits = quantised_products.fits(
                linear.mode, linear.bits, linear.group_size, linear.inputs, linear.dtype
            )
            if fits and rows <= quantised_products.ROWS_MAX:
                found["kernel"] = few_packed_rows
        elif rows <= plain_products.FEW_ROWS_MAX and plain_products.fits(linear.inputs, linear.dtype):
            found["kernel"] = few_rows
        return found

    def unmeasured(self, linear: Linear, rows: int) -> str:
        """See `Ops`. MLX's products with packed weights fall off by factors for several rows: the kernel does not."""
        is_packed = linear.bits and rows > 1 and "kernel" in self.variants(linear, rows)
        return "kernel" if is_packed else super().unmeasured(linear, rows)

    def measured_rows(self, linear: Linear) -> Sequence[int]:
        """See `Ops`."""
        if linear.bits:
            return super().measured_rows(linear)
        # One row is best with MLX's own, and more than all of these with cuBLAS.
        return ROWS if len(self.variants(linear, ROWS[0])) > 1 else ()

    def loss_max(self, linear: Linear, rows: int) -> float:
        """See `Ops`. The host starts a kernel in half the time of cuBLAS."""
        return super().loss_max(linear, rows) if linear.bits else _LOSS_MAX

    @staticmethod
    def _is_bare(linear: Linear, inputs: mx.array) -> bool:
        """Whether a product is all there is to it."""
        return not linear.bits and linear.bias is None and linear.dtype == inputs.dtype


def few_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with weights in half precision, by the kernel for up to 32 rows."""
    if inputs.dtype != linear.dtype:
        return product(inputs, linear)
    return _with_bias(plain_products.few_rows(inputs, linear.weight), linear)


def few_packed_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with packed weights, by the kernel for up to 64 rows."""
    if inputs.dtype != linear.dtype:
        return multiply_unpacked(inputs, linear)
    assert linear.scales is not None, "packed weights have scales"
    assert linear.biases is not None, "affine weights have biases"
    found = quantised_products.few_rows(
        inputs, linear.weight, linear.scales, linear.biases, linear.bits, linear.group_size
    )
    return _with_bias(found, linear)


def _with_bias(found: mx.array, linear: Linear) -> mx.array:
    return found if linear.bias is None else found + linear.bias


@lru_cache(maxsize=16)
def _place(offset: int) -> mx.array:
    """The position of one row alone, which all layers read."""
    return mx.array([offset], dtype=mx.int32)
