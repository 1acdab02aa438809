"""EmbeddingGemma: Gemma 3's layers with attention in both directions, of all tokens or of a window.

From Google, "EmbeddingGemma" (2025) and "Gemma 3" (2025).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from zmqengine.engine.embedding.backend import Activations
from zmqengine.engine.embedding.encoders.parts import FULL, SLIDING, layer_kind, rotary_base, rotated
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.models.arrays import Weights, activation, joined, renamed, whole

_PREFIXES = ("model.",)
_RULES = (
    (r"embed_tokens\.(\w+)", r"word.\1"),
    (r"layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(\w+)", r"layers.\1.\2.\3"),
    (r"layers\.(\d+)\.self_attn\.o_proj\.(\w+)", r"layers.\1.out.\2"),
    (r"layers\.(\d+)\.self_attn\.(q|k)_norm\.weight", r"layers.\1.\2_norm.weight"),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(\w+)", r"layers.\1.\2.\3"),
    (r"layers\.(\d+)\.(\w+_layernorm)\.weight", r"layers.\1.\2.weight"),
    (r"norm\.weight", r"norm.weight"),
)


class RootMeanSquareNorm(Module):
    """Norm by the root of the mean square, with a scale that the checkpoint stores less 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.zeros(width)
        self._eps = eps

    def __call__(self, states: mx.array) -> mx.array:
        return mx.fast.rms_norm(states, 1 + self.weight, self._eps)


class Gemma3Layer(Module):
    """Attention, then a gated network, each between two norms."""

    def __init__(self, config: dict[str, Any], index: int, activations: Activations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = whole(config["hidden_size"], "hidden_size"), config["intermediate_size"]
        eps, bias = config.get("rms_norm_eps", 1e-6), config.get("attention_bias", False)
        self._heads = whole(config["num_attention_heads"], "num_attention_heads")
        self._pairs = whole(config["num_key_value_heads"], "num_key_value_heads")
        self._width = whole(config.get("head_dim", 256), "head_dim")
        self.qkv = Linear(width, (self._heads + 2 * self._pairs) * self._width, bias=bias)
        self.q_norm = RootMeanSquareNorm(self._width, eps)
        self.k_norm = RootMeanSquareNorm(self._width, eps)
        self.out = Linear(self._heads * self._width, width, bias=bias)
        self.gate_up = Linear(width, 2 * inner, bias=False)
        self.down = Linear(inner, width, bias=False)
        self.input_layernorm = RootMeanSquareNorm(width, eps)
        self.post_attention_layernorm = RootMeanSquareNorm(width, eps)
        self.pre_feedforward_layernorm = RootMeanSquareNorm(width, eps)
        self.post_feedforward_layernorm = RootMeanSquareNorm(width, eps)
        self._activation = activations(config.get("hidden_activation", "gelu_pytorch_tanh"))
        self._scale = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
        is_global = not (index + 1) % config.get("sliding_window_pattern", 6)
        kind = layer_kind(config, index, FULL if is_global else SLIDING)
        # `sliding_window` counts both sides, as ModernBERT's `local_attention` does.
        self._window = config.get("sliding_window", 512) // 2 if kind == SLIDING else None
        older = {FULL: config.get("rope_theta", 1e6), SLIDING: config.get("rope_local_base_freq", 1e4)}
        self._base = rotary_base(config, kind, older[kind])

    def __call__(self, states: mx.array, batch: TextBatch) -> mx.array:
        counts = [self._heads, self._pairs, self._pairs]
        queries, keys, values = batch.heads(self.qkv(self.input_layernorm(states)), counts)
        attended = batch.attend(
            rotated(self.q_norm(queries), self._base),
            rotated(self.k_norm(keys), self._base),
            values,
            scale=self._scale,
            window=self._window,
        )
        states = states + self.post_attention_layernorm(self.out(attended))
        gate, up = mx.split(self.gate_up(self.pre_feedforward_layernorm(states)), 2, axis=-1)
        made: mx.array = states + self.post_feedforward_layernorm(self.down(self._activation(gate) * up))
        return made


class Gemma3(Module):
    def __init__(self, config: dict[str, Any], activations: Activations = activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = whole(config["hidden_size"], "hidden_size")
        self.word = Embedding(config["vocab_size"], width)
        layers = whole(config["num_hidden_layers"], "num_hidden_layers")
        self.layers = [Gemma3Layer(config, index, activations) for index in range(layers)]
        self.norm = RootMeanSquareNorm(width, config.get("rms_norm_eps", 1e-6))
        self._scale = width**0.5

    def start(self, batch: TextBatch) -> mx.array:
        """Embedded tokens, scaled in their own precision."""
        states: mx.array = self.word(batch.ids)
        return states * mx.array(self._scale, states.dtype)

    def finish(self, states: mx.array) -> mx.array:
        """Normalised once more."""
        made: mx.array = self.norm(states)
        return made


def context_tokens(config: dict[str, Any]) -> int:
    """Tokens that the model was made for."""
    return int(config["max_position_embeddings"])


def arrays(weights: Weights, labels: int) -> Weights:
    """A checkpoint's arrays by our names."""
    found = joined(renamed(weights, _PREFIXES, _RULES), ("q", "k", "v"), "qkv")
    return joined(found, ("gate", "up"), "gate_up")
