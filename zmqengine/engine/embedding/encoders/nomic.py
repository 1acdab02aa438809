"""Nomic BERT: BERT's order of norms with rotary positions, gated networks and products without a bias.

From Nussbaum et al., "Nomic Embed" (2024). Arrays have two sets of names: those of the code that the checkpoint was
published with, and those of transformers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.embedding.backend import Activations
from zmqengine.engine.embedding.encoders.parts import embedded, rotary_base, rotated
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.models.arrays import Weights, activation, joined, renamed, whole
from zmqengine.errors import ModelLoadError

_PREFIXES = ("nomic_bert.", "bert.", "model.")
_RULES = (
    (r"embeddings\.(word|token_type)_embeddings\.(\w+)", r"\1.\2"),
    (r"(?:emb_ln|embeddings\.LayerNorm)\.(\w+)", r"norm.\1"),
    (r"(?:encoder\.)?layers\.(\d+)\.attn\.Wqkv\.(\w+)", r"layers.\1.qkv.\2"),
    (r"layers\.(\d+)\.self_attn\.(q|k|v)_proj\.(\w+)", r"layers.\1.\2.\3"),
    (r"(?:encoder\.)?layers\.(\d+)\.(?:attn\.out_proj|self_attn\.o_proj)\.(\w+)", r"layers.\1.out.\2"),
    (r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc11|up_proj)\.(\w+)", r"layers.\1.up.\2"),
    (r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc12|gate_proj)\.(\w+)", r"layers.\1.gate.\2"),
    (r"(?:encoder\.)?layers\.(\d+)\.mlp\.(?:fc2|down_proj)\.(\w+)", r"layers.\1.down.\2"),
    (r"(?:encoder\.)?layers\.(\d+)\.(?:norm1|post_attention_layernorm)\.(\w+)", r"layers.\1.attention_norm.\2"),
    (r"(?:encoder\.)?layers\.(\d+)\.(?:norm2|post_mlp_layernorm)\.(\w+)", r"layers.\1.norm.\2"),
)  # fmt: skip
# Features of the older code that no published embedder uses.
_PLAIN: dict[str, object] = {
    "prenorm": False, "rotary_emb_interleaved": False, "rotary_emb_fraction": 1.0, "qkv_proj_bias": False,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "use_rms_norm": False,
}  # fmt: skip


class NomicLayer(Module):
    """Attention, then a gated network; each is added, then normalised."""

    def __init__(self, config: dict[str, Any], activations: Activations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = whole(config["hidden_size"], "hidden_size"), config["intermediate_size"]
        eps = config.get("layer_norm_eps", 1e-12)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.attention_norm = LayerNorm(width, eps=eps)
        self.gate_up = Linear(width, 2 * inner, bias=False)
        self.down = Linear(inner, width, bias=False)
        self.norm = LayerNorm(width, eps=eps)
        self._heads = whole(config["num_attention_heads"], "num_attention_heads")
        self._width = width // self._heads
        self._activation = activations(config.get("hidden_act", "silu"))
        self._base = rotary_base(config, "", config.get("rope_theta", 1000.0))

    def __call__(self, states: mx.array, batch: TextBatch) -> mx.array:
        queries, keys, values = batch.heads(self.qkv(states), [self._heads] * 3)
        attended = batch.attend(
            rotated(queries, self._base),
            rotated(keys, self._base),
            values,
            scale=self._width**-0.5,
        )
        states = self.attention_norm(states + self.out(attended))
        gate, up = mx.split(self.gate_up(states), 2, axis=-1)
        normed: mx.array = self.norm(states + self.down(self._activation(gate) * up))
        return normed


class NomicBert(Module):
    def __init__(self, config: dict[str, Any], activations: Activations = activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _check_plain(config)
        width = whole(config["hidden_size"], "hidden_size")
        self.word = Embedding(config["vocab_size"], width)
        self.token_type = Embedding(config.get("type_vocab_size", 2), width)
        self.norm = LayerNorm(width, eps=config.get("layer_norm_eps", 1e-12))
        layers = whole(config["num_hidden_layers"], "num_hidden_layers")
        self.layers = [NomicLayer(config, activations) for _ in range(layers)]

    def start(self, batch: TextBatch) -> mx.array:
        """The sum of what tokens and parts of a pair are embedded as, normalised."""
        return embedded(batch, self.norm, self.word, self.token_type)

    def finish(self, states: mx.array) -> mx.array:
        """The states: the last layer ends with its norm."""
        return states


def context_tokens(config: dict[str, Any]) -> int:
    """Tokens that the model was trained on; beyond them the older code scales positions."""
    return int(config.get("max_position_embeddings", 2048))


def arrays(weights: Weights, labels: int) -> Weights:
    """A checkpoint's arrays by our names."""
    found = joined(renamed(weights, _PREFIXES, _RULES), ("q", "k", "v"), "qkv")
    return joined(found, ("gate", "up"), "gate_up")


def _check_plain(config: dict[str, Any]) -> None:
    for field, usual in _PLAIN.items():
        if config.get(field, usual) != usual:
            raise ModelLoadError(f"config.json: {field} is {config[field]!r}; only {usual!r} is supported")
