"""Small random models of many architectures, for checks of a device and for tests. Their tokens are nonsense."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

VOCAB_SIZE = 320
"""A tokenizer of this size has every byte and a few words."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Every other layer sees only the last 32 tokens.
SLIDING: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Layers whose state does not grow with the text.
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
# Each token is worked on by two of four experts.
MIXTURE: dict[str, Any] = {
    key: value for key, value in LLAMA.items() if key not in ("head_dim", "max_position_embeddings")
} | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# Layers with a state, convolutions, beside layers that see everything.
HYBRID: dict[str, Any] = {
    **LLAMA,
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"] * 2,
}

_BASE: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"}
_GEMMA4: dict[str, Any] = {
    **_BASE,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
}
_DELTA: dict[str, Any] = {
    **_BASE,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
_DEEPSEEK_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 2.0,
    "mscale": 1.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "sliding window": SLIDING,
    "mamba": MAMBA,
    "mixtral": MIXTURE,
    "lfm2": HYBRID,
    "qwen2": {**_BASE, "model_type": "qwen2"},
    "qwen3": {**_BASE, "model_type": "qwen3"},
    "qwen3_moe": {
        **_BASE,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "gemma2": {**_BASE, "model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **_BASE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    # Inputs of each layer's own, and the last layers read the keys and values of earlier ones.
    "gemma4_text": {
        **_GEMMA4,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    # A mixture beside the MLP, and values that are keys.
    "gemma4 mixture": {
        **_GEMMA4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    # Sinks, windows of every second layer, and experts with biases.
    "gpt_oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    # A router by sigmoids with a bias for the choice, and an expert that takes every token.
    "glm4_moe": {
        **_BASE,
        "model_type": "glm4_moe",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "mimo": {**_BASE, "model_type": "mimo", "tie_word_embeddings": False},
    # Three of four layers have the gated delta rule, whose state does not grow with the text.
    "qwen3_5": {**_DELTA, "model_type": "qwen3_5", "tie_word_embeddings": True},
    "qwen3_5 mixture": {
        **_DELTA,
        **_SHARED_EXPERT,
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        **_DELTA,
        **_SHARED_EXPERT,
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **{key: value for key, value in HYBRID.items() if not key.startswith("block_")},
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.0,
    },
    "phi3": {**_BASE, "model_type": "phi3"},
    "cohere2": {**_BASE, "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 32},
    "granite": {
        **_BASE,
        "model_type": "granite",
        "logits_scaling": 1.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "olmo2": {**_BASE, "model_type": "olmo2"},
    # Keys and values of all heads come out of one small vector a token.
    "deepseek_v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "n_routed_experts": 4,
        "rope_scaling": {**_DEEPSEEK_YARN, "mscale_all_dim": 1.0},
    },
    # The same, with experts chosen from two of four groups.
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**_DEEPSEEK_YARN, "mscale_all_dim": 0.8},
    },
    "glm4_moe_lite": {**_LATENT, "model_type": "glm4_moe_lite", "q_lora_rank": None, "n_routed_experts": 4},
    # Layers that hold two caches each: a recurrent state beside keys and values.
    "falcon_h1": {
        **_BASE,
        "model_type": "falcon_h1",
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_chunk_size": 16,
    },
    # Layers that hold a convolution's state beside keys and values, every other one of a sliding window.
    "baichuan_m1": {
        **_BASE,
        "model_type": "baichuan_m1",
        "tie_word_embeddings": False,
        "sliding_window": 32,
        "sliding_window_layers": [1],
        "conv_window": 2,
    },
    # Sparse attention: an indexer with a cache of its own picks the columns that each token sees.
    "deepseek_v32": {
        **_BASE,
        "model_type": "deepseek_v32",
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    # Two attentions a layer, each with a cache.
    "longcat_flash": {
        "model_type": "longcat_flash",
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    },
    # Three of four layers see chunks of the text, in caches of a kind of their own.
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_BASE,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    # A cache of indexer keys in sparse layers, and a list of one cache in the others. mlx-lm cuts blocks of keys by
    # columns of the cache, so that padding moves them: here all of them are kept.
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            **_BASE,
            "model_type": "minimax_m3",
            "num_hidden_layers": 2,
            "dense_intermediate_size": 128,
            "shared_intermediate_size": 32,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1],
            "sparse_attention_freq": [0, 1],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 16,
            "index_topk_blocks": 16,
        },
    },
}


def build_model(config: Mapping[str, Any] = LLAMA, seed: int = 0) -> Any:
    """A model of mlx-lm's class for `config` with weights drawn from `seed`, evaluated.

    The weights are larger than usual, so that the likeliest token stands clear of the second.
    """
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    mx.random.seed(seed)
    model.update_modules(model.leaf_modules())
    named: Any = tree_flatten(model.parameters())
    drawn = [
        (name, mx.random.normal(leaf.shape) * (0.3 if leaf.ndim > 1 else 0.05) + (leaf.ndim == 1))
        for name, leaf in named
        if isinstance(leaf, mx.array)
    ]
    model.load_weights(drawn)
    mx.eval(model.parameters())
    model.eval()
    return model
