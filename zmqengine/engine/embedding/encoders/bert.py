"""BERT and its kind, RoBERTa, XLM-RoBERTa and CamemBERT: embeddings, layers with the norm behind, a head for scores.

From Devlin et al., "BERT" (NAACL 2019). RoBERTa's positions begin after the id of its padding. Jina's second models
(Guenther et al., "Jina Embeddings 2", 2023) have gated networks, and scores that fall with the distance in place of
positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from zmqengine.engine.embedding.backend import Activations
from zmqengine.engine.embedding.encoders.parts import embedded
from zmqengine.engine.embedding.text_batch import TextBatch
from zmqengine.engine.models.arrays import Weights, activation, joined, renamed, whole
from zmqengine.errors import ModelLoadError

_PREFIXES = ("bert.", "roberta.", "model.", "0.auto_model.")
_RULES = (
    (r"embeddings\.(word|position|token_type)_embeddings\.(\w+)", r"\1.\2"),
    (r"embeddings\.LayerNorm\.(\w+)", r"norm.\1"),
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)\.(\w+)", r"layers.\1.\2.\3"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.(\w+)", r"layers.\1.out.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.(\w+)", r"layers.\1.attention_norm.\2"),
    (r"encoder\.layer\.(\d+)\.(?:intermediate\.dense|mlp\.gated_layers)\.(\w+)", r"layers.\1.up.\2"),
    (r"encoder\.layer\.(\d+)\.(?:output\.dense|mlp\.wo)\.(\w+)", r"layers.\1.down.\2"),
    (r"encoder\.layer\.(\d+)\.(?:output\.LayerNorm|mlp\.layernorm)\.(\w+)", r"layers.\1.norm.\2"),
    (r"classifier\.dense\.(\w+)", r"dense.\1"),
    (r"classifier\.out_proj\.(\w+)", r"classifier.\1"),
    (r"pooler\.dense\.(\w+)", r"dense.\1"),
    (r"classifier\.(weight|bias)", r"classifier.\1"),
)
# Activations of Jina's gated networks, by their names there.
_GATES = {"geglu": "gelu", "reglu": "relu"}


class BertLayer(Module):
    """Attention, then a network of two products; each is added, then normalised."""

    def __init__(self, config: dict[str, Any], activations: Activations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width, inner = whole(config["hidden_size"], "hidden_size"), config["intermediate_size"]
        eps = config.get("layer_norm_eps", 1e-12)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.attention_norm = LayerNorm(width, eps=eps)
        self._is_gated = has_distances(config)
        self.up = Linear(width, inner * (1 + self._is_gated), bias=not self._is_gated)
        self.down = Linear(inner, width)
        self.norm = LayerNorm(width, eps=eps)
        self._heads = whole(config["num_attention_heads"], "num_attention_heads")
        self._scale = (width // self._heads) ** -0.5
        self._activation = activations(_activation_of(config))
        self._slopes = mx.array(distance_slopes(self._heads)) if has_distances(config) else None

    def __call__(self, states: mx.array, batch: TextBatch) -> mx.array:
        queries, keys, values = batch.heads(self.qkv(states), [self._heads] * 3)
        attended = batch.attend(queries, keys, values, scale=self._scale, slopes=self._slopes)
        states = self.attention_norm(states + self.out(attended))
        inner = self.up(states)
        if self._is_gated:
            gate, inner = mx.split(inner, 2, axis=-1)
            inner = self._activation(gate) * inner
        else:
            inner = self._activation(inner)
        normed: mx.array = self.norm(states + self.down(inner))
        return normed


class Bert(Module):
    """An encoder of BERT's kind; `labels` of its head, 0 for none."""

    def __init__(
        self, config: dict[str, Any], labels: int = 0, activations: Activations = activation
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        width = whole(config["hidden_size"], "hidden_size")
        self.word = Embedding(config["vocab_size"], width)
        self._has_table = not has_distances(config)
        if self._has_table:
            self.position = Embedding(config["max_position_embeddings"], width)
        self.token_type = Embedding(config.get("type_vocab_size", 2), width)
        self.norm = LayerNorm(width, eps=config.get("layer_norm_eps", 1e-12))
        layers = whole(config["num_hidden_layers"], "num_hidden_layers")
        self.layers = [BertLayer(config, activations) for _ in range(layers)]
        if labels:
            self.dense = Linear(width, width)
            self.classifier = Linear(width, labels)
        self._first_position = first_position(config)

    def start(self, batch: TextBatch) -> mx.array:
        """The sum of what tokens, positions and parts of a pair are embedded as, normalised."""
        position = self.position if self._has_table else None
        return embedded(batch, self.norm, self.word, self.token_type, position, self._first_position)

    def finish(self, states: mx.array) -> mx.array:
        """The states: the last layer ends with its norm."""
        return states

    def score(self, hidden: mx.array, batch: TextBatch) -> mx.array:
        """From the first token."""
        made: mx.array = self.classifier(mx.tanh(self.dense(batch.first(hidden))))
        return made


def has_distances(config: dict[str, Any]) -> bool:
    """Whether the model is one of Jina's second: distances in place of positions (ALiBi), and gated networks."""
    return config.get("position_embedding_type") == "alibi"


def distance_slopes(heads: int) -> list[float]:
    """The loss of the scores of each head with a token of distance.

    From Press et al., "Train Short, Test Long" (ICLR 2022), and its code where `heads` is no power of two.
    """
    whole_power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole_power) for head in range(whole_power)]
    between = [2 ** (-4 * (head + 1) / whole_power) for head in range(0, 2 * whole_power, 2)]
    return slopes + between[: heads - whole_power]


def _activation_of(config: dict[str, Any]) -> str:
    if not has_distances(config):
        return str(config.get("hidden_act", "gelu"))
    kind = config.get("feed_forward_type", "original")
    if kind not in _GATES:
        raise ModelLoadError(f"config.json: feed_forward_type is {kind!r}, none of {', '.join(_GATES)}")
    return _GATES[kind]


def first_position(config: dict[str, Any]) -> int:
    """The row of the position table for a text's first token."""
    return 0 if config["model_type"] == "bert" else int(config.get("pad_token_id", 1)) + 1


def context_tokens(config: dict[str, Any]) -> int:
    """Tokens that the position table has rows for."""
    return int(config["max_position_embeddings"]) - first_position(config)


def arrays(weights: Weights, labels: int) -> Weights:
    """A checkpoint's arrays by our names."""
    found = joined(renamed(weights, _PREFIXES, _RULES), ("query", "key", "value"), "qkv")
    if labels:
        return found
    return {name: array for name, array in found.items() if not name.startswith(("dense.", "classifier."))}
