"""EAGLE-3 drafters of small models: in the published files, and their drafts computed by the published formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from tests.support.engines import runner_of
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.checkpoint.drafters import drafter_of
from zmqengine.engine.models.attention import WIDTH_MAX
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.families import read_drafter_weights
from zmqengine.engine.models.ops import Ops
from zmqengine.engine.models.slot_runner import SlotRunner, open_head

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
    tensors = random_tensors(shapes, seed)
    random = np.random.default_rng(seed)
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


def drafting_runner(
    model: Any, config: Mapping[str, Any], tensors: Mapping[str, mx.array], ops: Ops | None = None
) -> SlotRunner:
    """A runner of the model with the drafter; on MLX's operations, or on `ops`, which are replayed."""
    plain = runner_of(model, "mlx").decoder
    drafter = drafter_of(config)
    assert drafter is not None
    weights = read_drafter_weights(drafter.reader, config, tensors, plain.weights)
    decoder = DecoderModel(plain.weights, ops or plain.ops, replays=ops is not None, taps=weights.taps)
    return SlotRunner(decoder, 2048, open_head(weights, decoder))


BLOCK: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB_SIZE,
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": 6,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 2, 4]},
}
"""A DFlash drafter, which takes hidden states after the layers `TAPS`."""


def block_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors of a DFlash drafter, under the published names."""
    dim, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (dim, 3 * dim),
        "hidden_norm.weight": (dim,),
        "norm.weight": (dim,),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (dim,),
            f"{layer}.post_attention_layernorm.weight": (dim,),
            f"{layer}.self_attn.q_proj.weight": (heads * head_dim, dim),
            f"{layer}.self_attn.k_proj.weight": (key_heads * head_dim, dim),
            f"{layer}.self_attn.v_proj.weight": (key_heads * head_dim, dim),
            f"{layer}.self_attn.o_proj.weight": (dim, heads * head_dim),
            f"{layer}.self_attn.q_norm.weight": (head_dim,),
            f"{layer}.self_attn.k_norm.weight": (head_dim,),
            f"{layer}.mlp.gate_proj.weight": (inner, dim),
            f"{layer}.mlp.up_proj.weight": (inner, dim),
            f"{layer}.mlp.down_proj.weight": (dim, inner),
        }
    return random_tensors(shapes, seed)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, mx.array]:
    """Matrices around 0, and norms around 1."""
    random = np.random.default_rng(seed)
    return {
        name: mx.array((0.3 if len(shape) > 1 else 0.05) * random.normal(size=shape) + (len(shape) == 1))
        for name, shape in shapes.items()
    }


ASSISTED: dict[str, Any] = ARCHITECTURES["gemma4_text"]
ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": ASSISTED["hidden_size"],
    "tie_word_embeddings": True,
    "use_ordered_embeddings": False,
    "text_config": {
        **{
            name: ASSISTED[name]
            for name in ("head_dim", "global_head_dim", "num_key_value_heads", "sliding_window")
        },
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "use_double_wide_mlp": False,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
    },
}
"""An assistant of `ASSISTED`."""
CLUSTERED: dict[str, Any] = {
    **ASSISTANT,
    "use_ordered_embeddings": True,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 3,
}


def assistant_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Random tensors of an assistant, under the published names."""
    text, dim = config["text_config"], config["backbone_hidden_size"]
    own = text["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], own),
        "model.norm.weight": (own,),
        "pre_projection.weight": (own, 2 * dim),
        "post_projection.weight": (dim, own),
    }
    for number, kind in enumerate(text["layer_types"]):
        layer = f"model.layers.{number}"
        width = text["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        outputs = text["num_attention_heads"] * width
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (outputs, own),
            f"{layer}.self_attn.o_proj.weight": (own, outputs),
            f"{layer}.self_attn.q_norm.weight": (width,),
            f"{layer}.mlp.gate_proj.weight": (text["intermediate_size"], own),
            f"{layer}.mlp.up_proj.weight": (text["intermediate_size"], own),
            f"{layer}.mlp.down_proj.weight": (own, text["intermediate_size"]),
            f"{layer}.layer_scalar": (1,),
        }
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{layer}.{name}_layernorm.weight": (own,) for name in names}
    if not config["use_ordered_embeddings"]:
        return random_tensors(shapes, seed)
    shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], own)
    order = np.random.default_rng(seed).permutation(text["vocab_size"])
    return random_tensors(shapes, seed) | {"masked_embedding.token_ordering": mx.array(order)}


class _Formula:
    """The parts of a drafter by the published formulas, in float64."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], taps: Sequence[int]
    ) -> None:
        self._told = config.get("transformer_layer_config", config)
        self._config = config
        self._taps = taps
        self._named = {
            name: np.array(array).astype(np.float64) for name, array in tensors.items() if name != "t2d"
        }

    def _tapped(self, model: Any, tokens: Sequence[int]) -> np.ndarray:
        """The model's hidden states after the layers that are tapped, side by side."""
        states = [model.model.embed_tokens(mx.array([list(tokens)]))]
        for layer in model.model.layers:
            states.append(layer(states[-1], "causal"))
        return np.concatenate([np.array(states[tap][0], np.float64) for tap in self._taps], axis=-1)

    def _attention(self, layer: str, queried: np.ndarray, seen: np.ndarray, *, causal: bool) -> np.ndarray:
        """Of the last places of those that are `seen`."""
        told, count, first = self._told, len(queried), len(seen) - len(queried)
        dim, heads, key_heads = told["head_dim"], told["num_attention_heads"], told["num_key_value_heads"]
        queries = self._product(f"{layer}.self_attn.q_proj", queried).reshape(count, heads, dim)
        keys = self._product(f"{layer}.self_attn.k_proj", seen).reshape(-1, key_heads, dim)
        if f"{layer}.self_attn.q_norm.weight" in self._named:
            queries = self._norm(f"{layer}.self_attn.q_norm", queries)
            keys = self._norm(f"{layer}.self_attn.k_norm", keys)
        queries, keys = self._turned(queries, first), self._turned(keys, 0)
        values = self._product(f"{layer}.self_attn.v_proj", seen).reshape(-1, key_heads, dim)
        keys, values = (np.repeat(each, heads // key_heads, axis=1) for each in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(dim)
        if causal:
            scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, values).reshape(count, -1)
        return self._product(f"{layer}.self_attn.o_proj", attended)

    def _mlp(self, layer: str, hidden: np.ndarray) -> np.ndarray:
        inner = self._norm(f"{layer}.post_attention_layernorm", hidden)
        gate = self._product(f"{layer}.mlp.gate_proj", inner)
        up = self._product(f"{layer}.mlp.up_proj", inner)
        return self._product(f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _turned(self, states: np.ndarray, first: int) -> np.ndarray:
        half = states.shape[-1] // 2
        speeds = self._told["rope_theta"] ** (-np.arange(half) / half)
        angles = (first + np.arange(len(states)))[:, None, None] * speeds
        one, other = states[..., :half], states[..., half:]
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cosines - other * sines, one * sines + other * cosines], axis=-1)

    def _norm(self, name: str, states: np.ndarray) -> np.ndarray:
        mean = np.mean(states**2, axis=-1, keepdims=True)
        return states / np.sqrt(mean + self._told["rms_norm_eps"]) * self._named[f"{name}.weight"]

    def _product(self, name: str, states: np.ndarray) -> np.ndarray:
        return states @ self._named[f"{name}.weight"].T + self._named.get(f"{name}.bias", 0.0)


class Eagle(_Formula):
    """An EAGLE-3 drafter: all pairs of a text at once, whatever was computed before."""

    def drafts(self, model: Any, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest draft tokens after a text, whose last token the model has not read."""
        tapped = self._tapped(model, tokens[:-1])
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
        layer = "midlayer" if "midlayer.hidden_norm.weight" in self._named else "layers.0"
        embedding = self._named.get("embed_tokens.weight")
        if embedding is None:
            embedding = np.array(model.model.embed_tokens.weight, np.float64)
        normed = self._norm(f"{layer}.hidden_norm", hidden)
        embedded = self._norm(f"{layer}.input_layernorm", embedding[list(tokens)])
        pair = np.concatenate([embedded, normed], axis=-1)
        residual = normed if self._config.get("norm_before_residual") else hidden
        hidden = residual + self._attention(layer, pair, pair, causal=True)
        return hidden + self._mlp(layer, hidden)


class Block(_Formula):
    """A DFlash drafter: all of a text at once, and a block of its width behind it."""

    def drafts(self, model: Any, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest draft tokens after a text, whose last token the model has not read."""
        context = self._norm("hidden_norm", self._product("fc", self._tapped(model, tokens[:-1])))
        told = {**self._config, **self._config["dflash_config"]}
        masks = [told["mask_token_id"]] * (min(told["block_size"], WIDTH_MAX) - 1)
        embedding = np.array(model.model.embed_tokens.weight, np.float64)
        hidden = embedding[[tokens[-1], *masks]]
        for number in range(self._config["num_hidden_layers"]):
            layer = f"layers.{number}"
            normed = self._norm(f"{layer}.input_layernorm", hidden)
            hidden = hidden + self._attention(layer, normed, np.concatenate([context, normed]), causal=False)
            hidden = hidden + self._mlp(layer, hidden)
        outputs = self._norm("norm", hidden) @ np.array(model.lm_head.weight, np.float64).T
        return [int(word) for word in outputs[1 : count + 1].argmax(-1)]


class Assistant:
    """An assistant by the published formula, on mlx-lm's layers: over the model's keys and values of a whole text."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], taps: Sequence[int]
    ) -> None:
        self._config, self._named = config, tensors
        text = config["text_config"]
        args = ModelArgs.from_dict({**text, "vocab_size_per_layer_input": 0})
        self._layers = [DecoderLayer(args, number) for number in range(args.num_hidden_layers)]
        for number, layer in enumerate(self._layers):
            prefix = f"model.layers.{number}."
            layer.load_weights(
                [
                    (name.removeprefix(prefix), each)
                    for name, each in tensors.items()
                    if name.startswith(prefix)
                ]
            )
        self._kinds = text["layer_types"]

    def drafts(self, model: Any, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest draft tokens after a text, whose last token the model has not read."""
        known, word = len(tokens) - 1, tokens[-1]
        cache = make_prompt_cache(model)
        hidden = model.model(mx.array([list(tokens[:-1])]), cache)[:, -1:]
        drafted = []
        for _ in range(count):
            embedded = model.model.embed_tokens(mx.array([[word]])) * model.model.embed_scale
            states = mx.concatenate([embedded, hidden], axis=-1) @ self._named["pre_projection.weight"].T
            for layer, kind in zip(self._layers, self._kinds, strict=True):
                states = layer(states, None, shared_kv=self._read(model, cache, kind, known), offset=known)[0]
            outputs = mx.fast.rms_norm(states, self._named["model.norm.weight"], 1e-6)
            hidden = outputs @ self._named["post_projection.weight"].T
            word = self._word(np.array(outputs[0, 0]))
            drafted.append(word)
        return drafted

    def _read(self, model: Any, cache: Any, kind: str, known: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the model's last layer of a kind that has any; with a window, the last ones."""
        owners = [
            source
            for layer, source in zip(model.model.layers, model.model.previous_kvs, strict=True)
            if layer.layer_type == kind
        ]
        held = cache[owners[-1]]
        keys, values = (each[:, :, :known] for each in (held.keys, held.values))
        if kind == "full_attention":
            return keys, values
        keys, values = (held._temporal_order(each) for each in (held.keys, held.values))
        window = self._config["text_config"]["sliding_window"]
        return keys[:, :, :known][:, :, -window:], values[:, :, :known][:, :, -window:]

    def _word(self, outputs: np.ndarray) -> int:
        logits = np.array(self._named["model.embed_tokens.weight"]) @ outputs
        if self._config["use_ordered_embeddings"]:
            scores = np.array(self._named["masked_embedding.centroids.weight"]) @ outputs
            chosen = np.argsort(scores)[-self._config["centroid_intermediate_top_k"] :]
            order = np.array(self._named["masked_embedding.token_ordering"]).reshape(len(scores), -1)
            left_out = np.setdiff1d(np.arange(len(logits)), order[chosen].ravel())
            logits[left_out] = -np.inf
        return int(np.argmax(logits))


def right_model_and_drafter(
    target: dict[str, Any] = TARGET,
) -> tuple[Any, dict[str, Any], dict[str, mx.array]]:
    """A model whose last layer decides by the last token alone, and a drafter that has the same layer.

    The model's other layers and its attention add nothing. The drafter's attention sees its own column alone, by
    biases of queries and keys that only the rotation tells apart, and hands on the embedding; the hidden state is left
    out by a norm of zeros. Its vocabulary is the model's, backwards.
    """
    model = build_model(target)
    inner, layers = model.model, model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        if layer is not layers[-1]:
            layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    inner.embed_tokens.weight = mx.fast.rms_norm(inner.embed_tokens.weight, None, 0.0)
    mx.eval(model.parameters())
    dim, head_dim = target["hidden_size"], target["hidden_size"] // 2
    heads = dim // head_dim
    config = {
        **EAGLE,
        "hidden_size": dim,
        "head_dim": head_dim,
        "draft_vocab_size": VOCAB_SIZE,
        "intermediate_size": target["intermediate_size"],
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
