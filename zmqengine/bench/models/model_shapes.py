"""Shapes of models of random weights, from a trivial one to 14B parameters, by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The config of a model of mlx-lm. `dtype` is that of the weights on disk; `words` of the vocabulary have a text.

    `packed_experts`: experts have 4 bits (MXFP4), whatever the other weights have.
    """

    config: Mapping[str, Any]
    dtype: str = "float32"
    words: int = 8192
    packed_experts: bool = False

    @property
    def vocabulary(self) -> int:
        """Tokens that the model has logits for."""
        return int(self.config["vocab_size"])

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a row."""
        return int(self.config["max_position_embeddings"])


_CONTEXT_TOKENS = 16384
# Vocabulary of the large models, as large as those of two tied embeddings of the originals.
_LARGE = 128_256


def _config(
    model_type: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **more,
    }


def _llama(*sizes: int, words: int = 8192, dtype: str = "float32") -> ModelShape:
    return ModelShape(config=_config("llama", *sizes), words=words, dtype=dtype)


def _experts(number: int, used: int, inner: int) -> dict[str, Any]:
    return {
        "num_experts": number,
        "num_experts_per_tok": used,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(*sizes: int, dim: int, window: int, dtype: str = "float32") -> ModelShape:
    config = _config(
        "gemma3_text",
        *sizes,
        head_dim=dim,
        sliding_window=window,
        sliding_window_pattern=6,
        query_pre_attn_scalar=dim,
        hidden_act="gelu_pytorch_tanh",
    )
    return ModelShape(config=config, dtype=dtype)


def _gemma4(*sizes: int, dim: int, own: int, shared: int, window: int, dtype: str = "float32") -> ModelShape:
    config = _config(
        "gemma4_text",
        *sizes,
        head_dim=dim,
        global_head_dim=2 * dim,
        hidden_size_per_layer_input=own,
        vocab_size_per_layer_input=sizes[-1],
        num_kv_shared_layers=shared,
        sliding_window=window,
        sliding_window_pattern=3,
    )
    return ModelShape(config=config, dtype=dtype)


def _gpt_oss(*sizes: int, dim: int, experts: int, packed: bool = False, dtype: str = "float32") -> ModelShape:
    config = _config(
        "gpt_oss",
        *sizes,
        head_dim=dim,
        sliding_window=128,
        num_local_experts=experts,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    return ModelShape(config=config, dtype=dtype, packed_experts=packed)


def _qwen35(*sizes: int, dim: int, values: int, keys: int, width: int, dtype: str = "float32") -> ModelShape:
    config = _config(
        "qwen3_5",
        *sizes,
        head_dim=dim,
        full_attention_interval=4,
        linear_num_value_heads=values,
        linear_num_key_heads=keys,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        linear_conv_kernel_dim=4,
        rope_parameters={"type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    )
    return ModelShape(config=config, dtype=dtype)


def _glm4(*sizes: int, experts: int, used: int, inner: int, dtype: str = "float32") -> ModelShape:
    config = _config(
        "glm4_moe",
        *sizes,
        moe_intermediate_size=inner,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        n_routed_experts=experts,
        routed_scaling_factor=1.0,
        num_experts_per_tok=used,
        first_k_dense_replace=1,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        rope_scaling=None,
    )
    return ModelShape(config=config, dtype=dtype)


def _lfm2(*sizes: int, attends_every: int) -> ModelShape:
    inner, layers = sizes[4], sizes[1]
    config = _config(
        "lfm2",
        *sizes,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=sizes[0],
        block_ff_dim=inner,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        full_attn_idxs=[layer for layer in range(layers) if (layer + 1) % attends_every == 0],
        tie_word_embeddings=True,
    )
    return ModelShape(config=config)


# Hidden states, layers, heads, key heads, width of the MLP, vocabulary. 0.2m measures the host alone. 0.5b and 8b have
# the layers of Qwen2.5-0.5B and Llama-3.1-8B, the others those of their namesakes; gpt-oss-14b has 16 of 24.
SHAPES: dict[str, ModelShape] = {
    "0.2m": _llama(64, 2, 4, 2, 128, 1024),
    # The depth of large models with trivial layers: measures the host's work for a step.
    "deep": _llama(64, 36, 4, 2, 128, 1024),
    "1m": _llama(128, 4, 4, 2, 256, 2048),
    "25m": _llama(512, 5, 8, 4, 1408, 8192),
    "150m": _llama(1024, 11, 16, 8, 2816, 8192),
    # The vocabulary of large models, to measure work for each token of it.
    "128k": _llama(256, 4, 4, 2, 704, 128_256, words=128_000),
    "0.5b": _llama(896, 24, 14, 2, 4864, 151_936, dtype="bfloat16"),
    "8b": _llama(4096, 32, 32, 8, 14336, 128_256, dtype="bfloat16"),
    # As many parameters, of which a token takes a sixth.
    "moe": ModelShape(
        config=_config("qwen3_moe", 2048, 24, 16, 4, 768, _LARGE, **_experts(64, 8, 768)), dtype="bfloat16"
    ),
    "qwen3-25m": ModelShape(config=_config("qwen3", 512, 5, 8, 4, 1408, 8192)),
    "gemma3-25m": _gemma3(512, 6, 4, 2, 1024, 8192, dim=64, window=512),
    "gemma4-25m": _gemma4(512, 6, 4, 2, 1024, 8192, dim=64, own=32, shared=2, window=512),
    "gpt-oss-25m": _gpt_oss(512, 4, 8, 2, 256, 8192, dim=64, experts=8),
    "qwen3.5-25m": _qwen35(512, 4, 4, 2, 1536, 8192, dim=128, values=8, keys=4, width=64),
    "glm4-25m": _glm4(512, 4, 8, 4, 1024, 8192, experts=8, used=2, inner=384),
    "lfm2-25m": _lfm2(512, 6, 8, 4, 1664, 8192, attends_every=3),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240, _LARGE, dim=256, window=1024, dtype="bfloat16"),
    "gpt-oss-14b": _gpt_oss(2880, 16, 64, 8, 2880, _LARGE, dim=64, experts=32, packed=True, dtype="bfloat16"),
    "qwen3.5-4b": _qwen35(
        2560, 32, 16, 4, 9216, _LARGE, dim=256, values=32, keys=16, width=128, dtype="bfloat16"
    ),
    "glm4-8b": _glm4(2048, 24, 16, 4, 6144, _LARGE, experts=64, used=8, inner=768, dtype="bfloat16"),
}
