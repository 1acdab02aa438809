"""EAGLE-3 drafters of small models: in the published files, and their drafts computed by the published formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.support.engines import runner_of
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.draft_head import DraftHead
from zmqengine.engine.models.families import read_drafter_weights
from zmqengine.engine.models.slot_runner import SlotRunner

TAPS = (2, 3, 5)
"""Numbers of layers after which `EAGLE` takes hidden states."""
TARGET: dict[str, Any] = {**LLAMA, "num_hidden_layers": 6, "tie_word_embeddings": False}
WORDS = 100
EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": WORDS,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
}


def eagle_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors of a drafter, under the published names. With a vocabulary of its own, that of some tokens."""
    told = config.get("transformer_layer_config", config)
    dim, inner, head_dim = told["hidden_size"], told["intermediate_size"], told["head_dim"]
    heads, key_heads = told["num_attention_heads"], told["num_key_value_heads"]
    layer = "midlayer"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (dim, 3 * config.get("target_hidden_size", dim)),
        "norm.weight": (dim,),
        "lm_head.weight": (config["draft_vocab_size"], dim),
        f"{layer}.input_layernorm.weight": (dim,),
        f"{layer}.hidden_norm.weight": (dim,),
        f"{layer}.post_attention_layernorm.weight": (dim,),
        f"{layer}.self_attn.q_proj.weight": (heads * head_dim, 2 * dim),
        f"{layer}.self_attn.k_proj.weight": (key_heads * head_dim, 2 * dim),
        f"{layer}.self_attn.v_proj.weight": (key_heads * head_dim, 2 * dim),
        f"{layer}.self_attn.o_proj.weight": (dim, heads * head_dim),
        f"{layer}.mlp.gate_proj.weight": (inner, dim),
        f"{layer}.mlp.up_proj.weight": (inner, dim),
        f"{layer}.mlp.down_proj.weight": (dim, inner),
    }
    random = np.random.default_rng(seed)
    tensors = {
        name: mx.array((0.3 if len(shape) > 1 else 0.05) * random.normal(size=shape) + (len(shape) == 1))
        for name, shape in shapes.items()
    }
    words = np.sort(random.permutation(told["vocab_size"])[: config["draft_vocab_size"]])
    tensors["d2t"] = mx.array(words - np.arange(len(words)))
    tensors["t2d"] = mx.array(np.isin(np.arange(told["vocab_size"]), words))
    return tensors


def save_drafter(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Path:
    """Write a drafter's directory, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tensors))
    return directory


def eagle_runner(model: Any, config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> SlotRunner:
    """A runner of the model with the drafter."""
    plain = runner_of(model, "mlx").decoder
    weights = read_drafter_weights(config, tensors, plain.weights)
    decoder = DecoderModel(plain.weights, plain.ops, taps=weights.taps)
    return SlotRunner(decoder, 2048, DraftHead(weights, decoder))


class Eagle:
    """A drafter by the published formula, in float64: all pairs of a text at once, whatever was computed before."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], taps: Sequence[int]
    ) -> None:
        self._told = config.get("transformer_layer_config", config)
        self._config = config
        self._taps = taps
        self._named = {
            name.replace("layers.0.", "midlayer."): np.array(array).astype(np.float64)
            for name, array in tensors.items()
            if name != "t2d"
        }

    def drafts(self, model: Any, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest draft tokens after a text, whose last token the model has not read."""
        states = [model.model.embed_tokens(mx.array([list(tokens[:-1])]))]
        for layer in model.model.layers:
            states.append(layer(states[-1], "causal"))
        tapped = np.concatenate([np.array(states[tap][0], np.float64) for tap in self._taps], axis=-1)
        if "input_norm.weight" in self._named:
            tapped = self._norm("input_norm", tapped)
        hidden = self._product("fc", tapped)
        known = list(tokens[1:])
        for _ in range(count):
            outputs = self._layer(model, known, hidden)
            word = int(np.argmax(self._product("lm_head", self._norm("norm", outputs[-1:]))[0]))
            known.append(word + int(self._named["d2t"][word]) if "d2t" in self._named else word)
            hidden = np.concatenate([hidden, outputs[-1:]])
        return known[len(tokens) - 1 :]

    def _layer(self, model: Any, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        embedding = self._named.get("embed_tokens.weight")
        if embedding is None:
            embedding = np.array(model.model.embed_tokens.weight, np.float64)
        normed = self._norm("midlayer.hidden_norm", hidden)
        embedded = self._norm("midlayer.input_layernorm", embedding[list(tokens)])
        pair = np.concatenate([embedded, normed], axis=-1)
        residual = normed if self._config.get("norm_before_residual") else hidden
        hidden = residual + self._product("midlayer.self_attn.o_proj", self._attention(pair))
        inner = self._norm("midlayer.post_attention_layernorm", hidden)
        gate = self._product("midlayer.mlp.gate_proj", inner)
        up = self._product("midlayer.mlp.up_proj", inner)
        return hidden + self._product("midlayer.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attention(self, pair: np.ndarray) -> np.ndarray:
        told, count = self._told, len(pair)
        dim, heads, key_heads = told["head_dim"], told["num_attention_heads"], told["num_key_value_heads"]
        queries = self._turned(self._product("midlayer.self_attn.q_proj", pair).reshape(count, heads, dim))
        keys = self._turned(self._product("midlayer.self_attn.k_proj", pair).reshape(count, key_heads, dim))
        values = self._product("midlayer.self_attn.v_proj", pair).reshape(count, key_heads, dim)
        keys, values = (np.repeat(each, heads // key_heads, axis=1) for each in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(dim)
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", shares, values).reshape(count, -1)

    def _turned(self, states: np.ndarray) -> np.ndarray:
        half = states.shape[-1] // 2
        speeds = self._told["rope_theta"] ** (-np.arange(half) / half)
        angles = np.arange(len(states))[:, None, None] * speeds
        one, other = states[..., :half], states[..., half:]
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cosines - other * sines, one * sines + other * cosines], axis=-1)

    def _norm(self, name: str, states: np.ndarray) -> np.ndarray:
        mean = np.mean(states**2, axis=-1, keepdims=True)
        return states / np.sqrt(mean + self._told["rms_norm_eps"]) * self._named[f"{name}.weight"]

    def _product(self, name: str, states: np.ndarray) -> np.ndarray:
        return states @ self._named[f"{name}.weight"].T + self._named.get(f"{name}.bias", 0.0)


def right_model_and_drafter() -> tuple[Any, dict[str, Any], dict[str, mx.array]]:
    """A model whose last layer decides by the last token alone, and a drafter that has the same layer.

    The model's other layers and its attention add nothing. The drafter's attention sees its own column alone, by
    biases of queries and keys that only the rotation tells apart, and hands on the embedding; the hidden state is left
    out by a norm of zeros. Its vocabulary is the model's, backwards.
    """
    model = build_model(TARGET)
    inner, layers = model.model, model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        if layer is not layers[-1]:
            layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    inner.embed_tokens.weight = mx.fast.rms_norm(inner.embed_tokens.weight, None, 0.0)
    mx.eval(model.parameters())
    dim, head_dim = TARGET["hidden_size"], EAGLE["head_dim"]
    heads = dim // head_dim
    config = {
        **EAGLE,
        "draft_vocab_size": VOCAB_SIZE,
        "intermediate_size": TARGET["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "attention_bias": True,
        "norm_before_residual": True,
    }
    tensors = eagle_tensors(config)
    attention, last = "midlayer.self_attn", layers[-1]
    backwards = mx.arange(VOCAB_SIZE - 1, -1, -1)
    tensors |= {
        "midlayer.hidden_norm.weight": mx.zeros(dim),
        "midlayer.input_layernorm.weight": mx.ones(dim),
        f"{attention}.q_proj.weight": mx.zeros((dim, 2 * dim)),
        f"{attention}.k_proj.weight": mx.zeros((dim, 2 * dim)),
        f"{attention}.q_proj.bias": mx.full((dim,), 20.0),
        f"{attention}.k_proj.bias": mx.full((dim,), 20.0),
        f"{attention}.v_proj.weight": mx.concatenate([mx.eye(dim), mx.zeros((dim, dim))], axis=-1),
        f"{attention}.v_proj.bias": mx.zeros(dim),
        f"{attention}.o_proj.weight": mx.eye(dim),
        f"{attention}.o_proj.bias": mx.zeros(dim),
        "midlayer.post_attention_layernorm.weight": last.post_attention_layernorm.weight,
        "norm.weight": inner.norm.weight,
        "lm_head.weight": model.lm_head.weight[backwards],
        "d2t": backwards - mx.arange(VOCAB_SIZE),
    }
    tensors |= {
        f"midlayer.mlp.{name}.weight": last.mlp[name].weight for name in ("gate_proj", "up_proj", "down_proj")
    }
    # Copied: reading the model joins some of them.
    return model, config, {name: mx.array(np.array(array)) for name, array in tensors.items()}
