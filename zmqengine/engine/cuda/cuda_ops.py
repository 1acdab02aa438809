"""`Ops` of a decoder layer on CUDA: our kernels for products where they are faster, and few kernels between them.

Between two products of a layer is a norm or the rotation of heads. Each is one kernel, fused with the sums and copies
around it. That halves the number of launches, and short steps are bound by the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda import (
    between_products,
    experts,
    plain_products,
    quantised_products,
    slot_attention,
    slot_recurrence,
    slot_storage,
)
from zmqengine.engine.cuda.slot_attention import CudaAttention
from zmqengine.engine.cuda.slot_recurrence import CudaRecurrence
from zmqengine.engine.cuda.slot_storage import CudaStorage
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.kv.slots import MlxStorage, SlotStorage
from zmqengine.engine.models.attention import SlotAttention
from zmqengine.engine.models.layers import Experts, HeadShape, Linear, Norm
from zmqengine.engine.models.ops import QKV, PlainOps, Product, multiply_dequantised, product
from zmqengine.engine.models.slot_recurrence import RecurrentMixer, SlotRecurrence

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

    def __init__(self) -> None:
        super().__init__(QUANTISED_ROWS_MAX, attention_is_fused=False)
        self._attends = False

    def padded(self, tokens: int) -> int:
        """See `Ops`. One of four sizes between two powers of two, and a multiple of the height of cuBLAS's tiles.

        MLX reuses a freed buffer only for about the same size, and chunks have all sizes: 480 allocations and releases
        a step took 8 ms of the host's time.
        """
        return few_sizes(tokens, _TILE if tokens > _TILE else 1)

    def add_and_norm(
        self,
        hidden: mx.array,
        added: mx.array,
        norm: Norm,
        added_norm: Norm | None = None,
        scale: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """See `Ops`."""
        factors = [norm.weight, *([] if added_norm is None else [added_norm.weight])]
        fits = all(weight.size % _FOUR == 0 for weight in factors)
        factors += [] if scale is None else [scale]
        if not fits or any(factor.dtype != hidden.dtype for factor in factors):
            return super().add_and_norm(hidden, added, norm, added_norm, scale)
        return between_products.add_and_norm(hidden, added, norm, added_norm, scale)

    def gated(self, inputs: mx.array, gate_up: tuple[Linear, ...], activation: str) -> mx.array:
        """See `PlainOps`. One kernel for the product and the activation."""
        linear = gate_up[0]
        is_one = len(gate_up) == 1 and not linear.bits and linear.dtype == inputs.dtype
        if (
            is_one
            and (self.deltas is None or linear.down is None)
            and self._variant(linear, inputs.shape[0]) is few_rows
        ):
            return plain_products.few_rows(inputs, linear.weight, linear.bias, activation=activation)
        return super().gated(inputs, gate_up, activation)

    def mixture(self, inputs: mx.array, logits: mx.array, mlp: Experts) -> mx.array:
        """See `PlainOps`."""
        is_adapted = self.deltas is not None and any(
            each.down is not None for each in (*mlp.gate_up, mlp.down)
        )
        if experts.supports(mlp) and inputs.dtype == mlp.down.dtype and not is_adapted:
            return experts.mixture(inputs, logits, mlp)
        return super().mixture(inputs, logits, mlp)

    def rotate(self, product: mx.array, heads: HeadShape, positions: Any) -> QKV:
        """See `Ops`. The kernel that writes keys and values into slots rotates them too, by one position a token."""
        if self._attends and not isinstance(positions, tuple):
            return (product,)
        return super().rotate(product, heads, positions)

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> SlotAttention:
        """See `Ops`. For heads without a kernel, such as those in float32, MLX's."""
        self._attends = _attends(heads)
        return CudaAttention(heads, caches) if self._attends else super().attention(heads, caches)

    def attends_beside(self, heads: Sequence[HeadShape]) -> bool:
        """See `Ops`."""
        return _attends(heads) == self._attends

    def recurrence(self, mixers: Sequence[RecurrentMixer]) -> SlotRecurrence:
        """See `Ops`. For layers without a kernel, MLX's."""
        return CudaRecurrence(mixers) if slot_recurrence.supports(mixers) else super().recurrence(mixers)

    def storage(self) -> SlotStorage:
        """See `Ops`."""
        return CudaStorage() if self._attends else MlxStorage()

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
        not. One row of MXFP4 is not measured."""
        is_slow = rows > 1 or linear.mode != "affine"
        is_quantised = linear.bits and is_slow and "kernel" in self.variants(linear, rows)
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


def _attends(heads: Sequence[HeadShape]) -> bool:
    """Whether there are kernels for these layers and their storage."""
    return slot_attention.supports(heads) and all(
        slot_storage.supports(each.dtype, each.dim) for each in heads
    )


def few_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with half-precision weights by the kernel for up to 32 rows."""
    if inputs.dtype != linear.dtype:
        return product(inputs, linear)
    return plain_products.few_rows(inputs, linear.weight, linear.bias)


def few_quantised_rows(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights by the kernel for up to 64 rows."""
    if inputs.dtype != linear.dtype:
        return multiply_dequantised(inputs, linear)
    return quantised_products.few_rows(inputs, linear)


def by_dequantised(inputs: mx.array, linear: Linear) -> mx.array:
    """A product with quantised weights, dequantised for this call by the kernel."""
    if inputs.dtype != linear.dtype:
        return multiply_dequantised(inputs, linear)
    return product(inputs, linear._replace(transposed=quantised_products.dequantised(linear).T))
