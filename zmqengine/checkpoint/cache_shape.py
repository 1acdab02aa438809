"""KV cache bytes per token and the context length, from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROWTH_TOKENS = 256
"""Tokens by which mlx-lm's KV caches grow at a time."""
SLOT_TOKENS_MIN = 512
"""Tokens of the smallest slot of a row in our own decoder: shorter rows share a pool, and so a call of attention."""
SLOT_SIZES_MAX = 8
"""Maximum number of sizes of slots: a kernel of ours takes the arrays of as many pools."""
VERIFY_TOKENS = 8
"""Tokens of the widest verify block, which a row's slot has room for behind its tokens."""
_SLOT_TYPES = {
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mimo",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
    ),
    *("gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "lfm2", "lfm2_moe"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "kimi_vl", "glm4_moe_lite"),
}
"""Types of the models that our own decoder computes."""
_FIXED_KINDS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "rwkv"}
_FIXED_MODELS = {"mamba", "mamba2", "rwkv7"}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_CONTEXT_TOKENS_UNKNOWN = 8192
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class ConfigShape:
    """Layers by kind of cache, and the numbers that one token takes in one layer.

    `sliding_tokens` is the window of sliding layers; `fixed_layers` hold a recurrent state that does not grow.
    `in_slots`: our own decoder keeps all tokens of every other layer in slots of few sizes.
    """

    full_layers: int
    sliding_layers: int
    fixed_layers: int
    numbers_per_token: int
    sliding_tokens: int
    context_tokens: int
    latent: bool
    in_slots: bool

    @property
    def kind(self) -> str:
        """The kinds of cache, such as `full+sliding`."""
        full = "latent" if self.latent else "full"
        parts = [(self.full_layers, full), (self.sliding_layers, "sliding"), (self.fixed_layers, "state")]
        return "+".join(name for layers, name in parts if layers) or "none"

    def bytes_for(self, tokens: int, float_bytes: int) -> int:
        """Bytes of the KV caches of one chat of this many tokens, growth included."""
        if self.in_slots:
            layers = self.full_layers + self.sliding_layers
            slot = slot_tokens(tokens + VERIFY_TOKENS, self.context_tokens)
            return layers * slot * self.numbers_per_token * float_bytes
        grown = tokens + GROWTH_TOKENS
        held = self.full_layers * grown + self.sliding_layers * min(grown, self.sliding_tokens)
        return held * self.numbers_per_token * float_bytes


def shape_of(config: Mapping[str, Any]) -> ConfigShape:
    """The shape that a config.json describes; full attention where it does not say."""
    text = _text_part(config)
    layers = _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or 0
    kinds = _layer_kinds(text, layers)
    sliding = kinds.count("sliding")
    return ConfigShape(
        full_layers=kinds.count("full"),
        sliding_layers=sliding,
        fixed_layers=kinds.count("fixed"),
        numbers_per_token=_numbers_per_token(text),
        sliding_tokens=_number(text, "sliding_window", "attention_window_size") or 0,
        context_tokens=context_tokens(config),
        latent=bool(text.get("kv_lora_rank")),
        in_slots=text.get("model_type") in _SLOT_TYPES,
    )


def slot_tokens(tokens: int, context_tokens: int) -> int:
    """Tokens of the slot for a row of `tokens`: a power of two, or a full context.

    A larger context has larger small slots: `SLOT_SIZES_MAX` sizes in all.
    """
    least = max(SLOT_TOKENS_MIN, _power_of_two(-(-context_tokens >> (SLOT_SIZES_MAX - 1))))
    size = max(least, _power_of_two(tokens))
    full = max(least, -(-(context_tokens + VERIFY_TOKENS) // SLOT_TOKENS_MIN) * SLOT_TOKENS_MIN)
    return size if size < context_tokens or tokens > full else full


def _power_of_two(tokens: int) -> int:
    """The least one that is at least `tokens`."""
    return 1 << max(0, tokens - 1).bit_length()


def context_tokens(config: Mapping[str, Any]) -> int:
    """The longest context that a model was made for, prompt and output together."""
    for part in (config, *(config.get(name) for name in _LANGUAGE_PARTS)):
        if isinstance(part, Mapping) and (tokens := _number(part, *_CONTEXT_KEYS)):
            return tokens
    return _CONTEXT_TOKENS_UNKNOWN


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: multimodal models keep it under a name of its own."""
    for key in _LANGUAGE_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping) and _number(part, "num_hidden_layers"):
            return part
    return config


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    if config.get("model_type") in _FIXED_MODELS:
        return ["fixed"] * layers
    named = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(named, list) and named:
        return [_kind(str(name)) for name in named[:layers]]
    every = _number(config, "full_attention_interval")
    if every:
        return ["full" if (layer + 1) % every == 0 else "fixed" for layer in range(layers)]
    pattern = _number(config, "sliding_window_pattern")
    if pattern and _number(config, "sliding_window"):
        return ["full" if (layer + 1) % pattern == 0 else "sliding" for layer in range(layers)]
    return ["full"] * layers


def _kind(name: str) -> str:
    if "sliding" in name or "chunked" in name:
        return "sliding"
    return "fixed" if name in _FIXED_KINDS else "full"


def _numbers_per_token(config: Mapping[str, Any]) -> int:
    latent = _number(config, "kv_lora_rank")
    if latent:
        return latent + (_number(config, "qk_rope_head_dim") or 0)
    heads = _number(config, "num_attention_heads", "n_head", "n_heads") or 1
    kv_heads = _number(config, "num_key_value_heads", "n_kv_heads") or heads
    head = _number(config, "head_dim") or (_number(config, "hidden_size", "n_embd", "d_model") or 0) // heads
    return 2 * kv_heads * head


def _number(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return None
