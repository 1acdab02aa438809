"""`Ops` of a decoder layer on CUDA: our kernels for products where they are faster, and few kernels between them.

Between two products of a layer is a norm or the rotation of heads. Each is one kernel, fused with the sums and copies
around it. That halves the number of launches, and short steps are bound by the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from zmqengine.engine import kv
from zmqengine.engine.cuda import (
    attention,
    between_products,
    experts,
    kv_kernels,
    packed_attention,
    plain_products,
    quantised_products,
)
from zmqengine.engine.cuda.attention_in_place import (
    TracedInPlace,
    appends,
    attend_in_place,
    may_write,
)
from zmqengine.engine.cuda.between_products import rotates
from zmqengine.engine.cuda.packed_attention import TracedPacked
from zmqengine.engine.models.decoder_weights import Experts, HeadShape, Linear, Norm
from zmqengine.engine.models.few_sizes import few_sizes
from zmqengine.engine.models.ops import (
    QKV,
    PackedAttention,
    PlainOps,
    Product,
    TracedAttention,
    multiply_dequantised,
    product,
)

QUANTISED_ROWS_MAX = 7
"""Maximum rows for MLX's product with quantised weights: for more it compiles a kernel a size, up to half a minute
each."""

ROWS = (8, 16, 32)
"""Numbers of rows at which products in half precision are measured; more rows use cuBLAS."""

_LOSS_MAX = 1.05
_TILE = 64
# Numbers that the kernel for norms reads at once.
_FOUR = 4


class CudaOps(PlainOps):
    """`Ops` with the kernels of this folder."""

    traces_packed = True

    def __init__(self) -> None:
        super().__init__(QUANTISED_ROWS_MAX)

    def new_cache(self) -> Any:
        """See `Ops`."""
        return kv.RowKVCache()

    def make_room(self, layers: Sequence[HeadShape], caches: Sequence[Any], width: int) -> None:
        """See `Ops`. MLX's own growth and writes are six kernels a layer.

        Float32 is left to MLX: on an H200 a batch was wrong into which a prompt of three tokens, appended in place, was
        merged before it was computed. Longer ones have no kernel anyway.
        """
        kv_kernels.make_room(
            [
                (heads, cache)
                for heads, cache in zip(layers, caches, strict=True)
                if type(cache) is kv.RowKVCache
                and not cache.can_write_here(width, heads.dtype)
                and appends(heads, width)
                and attention.by_tensor_cores(heads.dtype, heads.dim)
            ],
            width,
        )

    def padded(self, tokens: int) -> int:
        """See `Ops`. One of four sizes between two powers of two, and a multiple of the height of cuBLAS's tiles.

        MLX reuses a freed buffer only for about the same size, and chunks have all sizes: 480 allocations and releases
        a step took 8 ms of the host's time.
        """
        return few_sizes(tokens, _TILE if tokens > _TILE else 1)

    def add_and_norm(self, hidden: mx.array, added: mx.array, norm: Norm) -> tuple[mx.array, mx.array]:
        """See `Ops`."""
        if norm.weight.size % _FOUR or norm.weight.dtype != hidden.dtype:
            return super().add_and_norm(hidden, added, norm)
        return between_products.add_and_norm(hidden, added, norm.weight, norm.eps)

    def gated(self, inputs: mx.array, gate_up: tuple[Linear, ...]) -> mx.array:
        """See `PlainOps`. One kernel for the product and the activation."""
        linear = gate_up[0]
        is_bare = len(gate_up) == 1 and self._is_bare(linear, inputs)
        if is_bare and self._variant(linear, inputs.shape[0]) is few_rows:
            return plain_products.few_rows(inputs, linear.weight, gated=True)
        return super().gated(inputs, gate_up)

    def mixture(self, inputs: mx.array, mlp: Experts) -> mx.array:
        """See `PlainOps`."""
        if experts.supports(mlp) and inputs.dtype == mlp.router.dtype == mlp.down.dtype:
            return experts.mixture(inputs, self.product(inputs, mlp.router), mlp)
        return super().mixture(inputs, mlp)

    def rotate(self, product: mx.array, heads: HeadShape, offset: mx.array | int, rows: int) -> QKV:
        """See `Ops`. Where one kernel rotates heads, `attend` does it, since it may write keys in place."""
        return (product,) if rotates(heads) else super().rotate(product, heads, offset, rows)

    def mask(self, cache: Any, width: int, window: int | None) -> Any:
        """See `Ops`. `kv.Spans`, for the kernel that needs no mask."""
        if window is not None:
            return super().mask(cache, width, window)
        if type(cache) is kv.RaggedKVCache:
            return cache.layout.spans()
        columns = cache.offset + width
        as_mask = partial(super().mask, cache, width, window)
        return kv.Spans(_position(0), columns, _position(columns), None, as_mask)

    def attend(self, qkv: QKV, heads: HeadShape, offset: mx.array | int, cache: Any, mask: Any) -> mx.array:
        """See `Ops`.

        Keys and values are written in place where the cache allows it; see the theory in `zmqengine.engine.kv`.
        """
        if len(qkv) == 1:
            (product,) = qkv
            offsets = offset if isinstance(offset, mx.array) else _position(offset)
            width = product.shape[-2] // offsets.shape[0]
            knows_columns = isinstance(mask, kv.Spans)
            if knows_columns and may_write(heads, cache, width) and appends(heads, width):
                shape = offsets.shape[0], heads.heads, width, heads.dim
                parts = attention.parts_of_rows(heads.dtype, shape, heads.key_heads, mask.columns)
                spans = attention.arrays_of(mask)
                queries, attended = attend_in_place(
                    heads, product, offsets, cache.keys, cache.values, spans, parts
                )
                if cache.wrote_in_place(width, queries):
                    kv.start(attended)
                return attended
            qkv = between_products.rotate(heads, product, offsets, width)
        queries, keys, values = qkv
        if isinstance(mask, kv.Spans) and attention.fits(queries, keys):
            # The kernel knows the last column in use: arrays are passed uncut.
            if type(cache) is kv.RaggedKVCache:
                cache.write(keys, values)
            else:
                cache.update_and_fetch(keys, values)
            return attention.ragged_attention(queries, cache.keys, cache.values, mask, heads.scale)
        keys, values = cache.update_and_fetch(keys, values)
        if isinstance(mask, kv.Spans):
            mask = mask.as_mask()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=heads.scale, mask=mask)

    def traced_attention(self, layers: Sequence[HeadShape]) -> TracedAttention | None:
        """See `Ops`."""
        is_supported = all(appends(heads, attention.ROW_WIDTH_MAX) for heads in layers)
        return TracedInPlace(layers) if is_supported else None

    def packed_attention(self, layers: Sequence[HeadShape]) -> PackedAttention | None:
        """See `Ops`."""
        return TracedPacked(layers) if packed_attention.supports(layers) else None

    def variants(self, linear: Linear, rows: int) -> Mapping[str, Product]:
        """See `Ops`."""
        found = dict(super().variants(linear, rows))
        if linear.bits:
            fits = quantised_products.fits(linear)
            if fits:
                found["dequantised"] = by_dequantised
            if fits and rows <= quantised_products.ROWS_MAX:
                found["kernel"] = few_quantised_rows
        elif rows <= plain_products.FEW_ROWS_MAX and plain_products.fits(linear.inputs, linear.dtype):
            found["kernel"] = few_rows
        return found

    def unmeasured(self, linear: Linear, rows: int) -> str:
        """See `Ops`. MLX's products with quantised weights are several times slower for several rows; the kernel is
        not."""
        is_quantised = linear.bits and rows > 1 and "kernel" in self.variants(linear, rows)
        return "kernel" if is_quantised else super().unmeasured(linear, rows)

    def measured_rows(self, linear: Linear) -> Sequence[int]:
        """See `Ops`."""
        if linear.bits:
            return super().measured_rows(linear)
        # One row is fastest with MLX's own kernel, and more than these with cuBLAS.
        return ROWS if len(self.variants(linear, ROWS[0])) > 1 else ()

    def loss_max(self, linear: Linear, rows: int) -> float:
        """See `Ops`. The host launches a kernel in half the time of cuBLAS."""
        return super().loss_max(linear, rows) if linear.bits else _LOSS_MAX

    @staticmethod
    def _is_bare(linear: Linear, inputs: mx.array) -> bool:
        """Whether the layer is a product alone, without bias."""
        return not linear.bits and linear.bias is None and linear.dtype == inputs.dtype


def few_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with half-precision weights by the kernel for up to 32 rows."""
    if inputs.dtype != linear.dtype:
        return product(inputs, linear)
    return _with_bias(plain_products.few_rows(inputs, linear.weight), linear)


def few_quantised_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights by the kernel for up to 64 rows."""
    if inputs.dtype != linear.dtype:
        return multiply_dequantised(inputs, linear)
    return _with_bias(quantised_products.few_rows(inputs, linear), linear)


def by_dequantised(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights, dequantised for this call by the kernel."""
    if inputs.dtype != linear.dtype:
        return multiply_dequantised(inputs, linear)
    return product(inputs, linear._replace(transposed=quantised_products.dequantised(linear).T))


def _with_bias(found: mx.array, linear: Linear) -> mx.array:
    return found if linear.bias is None else found + linear.bias


@lru_cache(maxsize=16)
def _position(offset: int) -> mx.array:
    """The position of a single row as an array [1], shared by all layers."""
    return mx.array([offset], dtype=mx.int32)
