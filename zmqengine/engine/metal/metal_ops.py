"""Operations of a decoder layer on Metal, with our kernels."""

from __future__ import annotations

from collections.abc import Sequence

from zmqengine.engine.metal import slot_attention
from zmqengine.engine.metal.slot_attention import MetalAttention
from zmqengine.engine.models.attention import SlotAttention
from zmqengine.engine.models.layers import HeadShape
from zmqengine.engine.models.ops import PlainOps


class MetalOps(PlainOps):
    """`Ops` with the kernels of this folder."""

    def attention(self, heads: Sequence[HeadShape], caches: Sequence[int]) -> SlotAttention:
        """See `Ops`. For heads without a kernel, such as those in float32, MLX's."""
        supported = slot_attention.supports(heads)
        return MetalAttention(heads, caches) if supported else super().attention(heads, caches)
