"""Operations of a decoder layer on a CPU, for models in float32.

MLX computes exp for one number at a time on x86, 15 ns each: softmax took 60 % of a chunk of a long prompt. Prompts
and rows in decode attend through NumPy, whose exp is vectorised; activations use `cpu_math` in MLX's graph. Decode
steps without prompts are those of `StepOps`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.models.cpu_math import exp_minus, silu
from zmqengine.engine.models.decoder import WIDTH_MAX
from zmqengine.engine.models.decoder_weights import DecoderWeights, HeadShape, Linear
from zmqengine.engine.models.ops import QKV, PlainOps
from zmqengine.engine.models.step_ops import UNSEEN, StepOps, attend_few, supports, to_add

# Tokens of a prompt that attend at once: their scores stay in a core's cache for prompts of a few thousand tokens.
_BLOCK_TOKENS = 64


class CpuOps(PlainOps):
    """`Ops` for MLX's CPU back-end. Other types than float32 compute as in `PlainOps`."""

    in_columns = True

    def gated(self, inputs: mx.array, gate_up: tuple[Linear, ...]) -> mx.array:
        """See `PlainOps`."""
        if inputs.dtype != mx.float32:
            return super().gated(inputs, gate_up)
        gate, up = mx.split(self.product(inputs, *gate_up), 2, axis=-1)
        return silu(gate) * up

    def step_ops(self, weights: DecoderWeights) -> StepOps | None:
        """See `Ops`."""
        return StepOps() if supports(weights) else None

    def attend(
        self,
        qkv: QKV,
        heads: HeadShape,
        offset: mx.array | int,
        cache: Any,
        mask: Any,
        *,
        lazily: bool = False,
    ) -> mx.array:
        """See `Ops`. Computed at once, unless `lazily`; heads with the same keys share a product."""
        queries, keys, values = qkv
        rows, count, width, dim = queries.shape
        if queries.dtype != mx.float32:
            return super().attend(qkv, heads, offset, cache, mask)
        keys, values = cache.update_and_fetch(keys, values)
        key_heads, columns = keys.shape[1:3]
        if isinstance(mask, str) and width <= WIDTH_MAX:
            mask = mx.arange(columns) <= mx.arange(columns - width, columns)[:, None]
        if not lazily:
            mx.eval(queries, keys, values, [] if mask is None or isinstance(mask, str) else mask)
            q, k, v = np.asarray(queries), np.asarray(keys), np.asarray(values)
            # A row that is not a number stays alone, and is noticed by its logits.
            with np.errstate(all="ignore"):
                if width <= WIDTH_MAX:
                    return mx.array(attend_few(q, k, v, heads.scale, None if mask is None else to_add(mask)))
                return mx.array(_attend_prompts(q, k, v, heads.scale, mask)).swapaxes(1, 2)
        grouped = (queries * heads.scale).reshape(rows, key_heads, -1, dim)
        scores = grouped @ keys.swapaxes(-1, -2)
        if mask is not None:
            if isinstance(mask, str):
                mask = mx.arange(columns) <= mx.arange(columns - width, columns)[:, None]
            unseen = mx.where(mask, 0.0, float(UNSEEN))
            # Masks of rows have one for all heads, which are two axes here.
            unseen = unseen[:, :, None] if unseen.ndim == 4 else unseen
            by_width = scores.reshape(rows, key_heads, -1, width, columns)
            scores = (by_width + unseen).reshape(scores.shape)
        shares = exp_minus(scores.max(axis=-1, keepdims=True) - scores)
        found: mx.array = (shares @ values) / shares.sum(axis=-1, keepdims=True)
        return found.reshape(rows, count, width, dim)

    def attend_lazily(
        self, qkv: QKV, heads: HeadShape, offset: mx.array | int, cache: Any, mask: Any
    ) -> mx.array:
        """See `Ops`."""
        return self.attend(qkv, heads, offset, cache, mask, lazily=True)


def _attend_prompts(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: Any) -> np.ndarray:
    """Attention of prompts, block by block of their tokens; returns [rows, width, heads, dim]."""
    is_causal = isinstance(mask, str)
    rows, heads, width, dim = q.shape
    key_heads, columns = k.shape[1:3]
    group = heads // key_heads
    # A causal mask hides columns of a block from its own tokens; other masks have all columns of each row.
    if is_causal:
        unseen = np.triu(np.full((_BLOCK_TOKENS, _BLOCK_TOKENS), UNSEEN, np.float32), 1)
    elif mask is not None:
        seen = np.broadcast_to(np.asarray(mask), (rows, 1, width, columns))
        unseen = np.where(seen, np.float32(0), UNSEEN)
    room = np.empty(group * _BLOCK_TOKENS * columns, np.float32)
    found = np.empty((rows, width, heads, dim), np.float32)
    for row, key_head, start in np.ndindex(rows, key_heads, -(-width // _BLOCK_TOKENS)):
        own = slice(key_head * group, (key_head + 1) * group)
        block = slice(start * _BLOCK_TOKENS, min(width, (start + 1) * _BLOCK_TOKENS))
        tokens = block.stop - block.start
        end = columns - width + block.stop if is_causal else columns
        scaled = (q[row, own, block] * np.float32(scale)).reshape(-1, dim)
        scores = room[: group * tokens * end].reshape(-1, end)
        np.matmul(scaled, k[row, key_head, :end].T, out=scores)
        by_head = scores.reshape(group, tokens, end)
        if is_causal:
            by_head[..., end - tokens :] += unseen[:tokens, :tokens]
        elif mask is not None:
            by_head += unseen[row, 0, block]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        attended = scores @ v[row, key_head, :end]
        attended /= scores.sum(axis=-1, keepdims=True)
        found[row, block, own] = attended.reshape(group, tokens, dim).swapaxes(0, 1)
    return found
