"""ModernBERT: the norm in front, rotary positions, gated networks, and layers that see a window only.

From Warner et al., "Smarter, Better, Faster, Longer" (2024).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.embedding.backend import Activations
from zmqengine.engine.embedding.encoders.parts import (
    FULL,
    SLIDING,
    embedded,
    layer_kind,
    rotary_base,
    rotated,
)
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.models.arrays import Weights, activation, renamed, whole

_PREFIXES = ("model.", "0.auto_model.")
_RULES = (
    (r"embeddings\.tok_embeddings\.(\w+)", r"word.\1"),
    (r"embeddings\.norm\.(\w+)", r"norm.\1"),
    (r"layers\.(\d+)\.(attn_norm|mlp_norm)\.(\w+)", r"layers.\1.\2.\3"),
    (r"layers\.(\d+)\.(?:attn|mlp)\.(Wqkv|Wi)\.(\w+)", r"layers.\1.\2.\3"),
    (r"layers\.(\d+)\.attn\.Wo\.(\w+)", r"layers.\1.out.\2"),
    (r"layers\.(\d+)\.mlp\.Wo\.(\w+)", r"layers.\1.down.\2"),
    (r"final_norm\.(\w+)", r"final_norm.\1"),
    (r"head\.(dense|norm)\.(\w+)", r"head_\1.\2"),
    (r"classifier\.(\w+)", r"classifier.\1"),
)


class ModernBertLayer(Module):
    """Attention, of all tokens or of a window, then a gated network."""

    def __init__(self, config: dict[str, Any], index: int, activations: Activations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = whole(config["hidden_size"], "hidden_size"), config["intermediate_size"]
        eps, norm_bias = config.get("norm_eps", 1e-5), config.get("norm_bias", False)
        attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        self._is_first = index == 0
        if not self._is_first:
            self.attn_norm = LayerNorm(width, eps=eps, bias=norm_bias)
        self.Wqkv = Linear(width, 3 * width, bias=attention_bias)
        self.out = Linear(width, width, bias=attention_bias)
        self.mlp_norm = LayerNorm(width, eps=eps, bias=norm_bias)
        self.Wi = Linear(width, 2 * inner, bias=mlp_bias)
        self.down = Linear(inner, width, bias=mlp_bias)
        self._heads = whole(config["num_attention_heads"], "num_attention_heads")
        self._width = width // self._heads
        self._activation = activations(config.get("hidden_activation", "gelu"))
        is_global = not index % config.get("global_attn_every_n_layers", 3)
        kind = layer_kind(config, index, FULL if is_global else SLIDING)
        # `local_attention` counts both sides, the token itself among neither.
        self._window = config.get("local_attention", 128) // 2 if kind == SLIDING else None
        older = {
            FULL: config.get("global_rope_theta", 160_000.0), SLIDING: config.get("local_rope_theta") or 10_000.0
        }  # fmt: skip
        self._base = rotary_base(config, kind, older[kind])

    def __call__(self, states: mx.array, batch: TextBatch) -> mx.array:
        normed = states if self._is_first else self.attn_norm(states)
        queries, keys, values = batch.heads(self.Wqkv(normed), [self._heads] * 3)
        queries, keys = rotated(queries, self._base), rotated(keys, self._base)
        attended = batch.attend(queries, keys, values, scale=self._width**-0.5, window=self._window)
        states = states + self.out(attended)
        given, gate = mx.split(self.Wi(self.mlp_norm(states)), 2, axis=-1)
        states = states + self.down(self._activation(given) * gate)
        return states


class ModernBert(Module):
    """The encoder; `labels` of its head, 0 for none."""

    def __init__(
        self, config: dict[str, Any], labels: int = 0, activations: Activations = activation
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = whole(config["hidden_size"], "hidden_size")
        eps, norm_bias = config.get("norm_eps", 1e-5), config.get("norm_bias", False)
        self.word = Embedding(config["vocab_size"], width)
        self.norm = LayerNorm(width, eps=eps, bias=norm_bias)
        layers = whole(config["num_hidden_layers"], "num_hidden_layers")
        self.layers = [ModernBertLayer(config, index, activations) for index in range(layers)]
        self.final_norm = LayerNorm(width, eps=eps, bias=norm_bias)
        if labels:
            self.head_dense = Linear(width, width, bias=config.get("classifier_bias", False))
            self.head_norm = LayerNorm(width, eps=eps, bias=norm_bias)
            self.classifier = Linear(width, labels)
        self._head_activation = activations(config.get("classifier_activation", "gelu"))
        self._scores_mean = config.get("classifier_pooling", "cls") == "mean"

    def start(self, batch: TextBatch) -> mx.array:
        """Embedded tokens, normalised."""
        return embedded(batch, self.norm, self.word)

    def finish(self, states: mx.array) -> mx.array:
        """Normalised once more."""
        made: mx.array = self.final_norm(states)
        return made

    def score(self, hidden: mx.array, batch: TextBatch) -> mx.array:
        """From the first token or the mean, as the config says."""
        pooled = batch.mean(hidden).astype(hidden.dtype) if self._scores_mean else batch.first(hidden)
        made: mx.array = self.classifier(self.head_norm(self._head_activation(self.head_dense(pooled))))
        return made


def context_tokens(config: dict[str, Any]) -> int:
    """Tokens that the model was made for."""
    return int(config["max_position_embeddings"])


def arrays(weights: Weights, labels: int) -> Weights:
    """A checkpoint's arrays by our names."""
    found = renamed(weights, _PREFIXES, _RULES)
    if labels:
        return found
    return {name: array for name, array in found.items() if not name.startswith(("head_", "classifier."))}
