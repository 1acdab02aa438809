"""Variants of configurations of the decoder family, small."""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.quantized import quantize

from tests.support.models import LLAMA, SLIDING, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES

QWEN: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"}
MOE: dict[str, Any] = {
    **QWEN,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8,
    "long_factor": [1.0 + place / 4 for place in range(8)],
}  # fmt: skip

FAMILY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "one key head": {**LLAMA, "num_key_value_heads": 1},
    "as many key heads": {**LLAMA, "num_key_value_heads": 4},
    "heads of another size": {**LLAMA, "head_dim": 32},
    "head of its own": {**LLAMA, "tie_word_embeddings": False},
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "traditional rope": {**LLAMA, "rope_traditional": True},
    "llama3 rope": {**LLAMA, "rope_scaling": LLAMA_3_ROPE},
    "yarn rope": {**LLAMA, "rope_scaling": YARN},
    "linear rope": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "long rope": {**LLAMA, "rope_scaling": LONG},
    "partial rope": {**LLAMA, "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    "sliding window": SLIDING,
    "qwen2": {**QWEN, "model_type": "qwen2"},
    "qwen2, head of its own": {**QWEN, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {**QWEN, "model_type": "qwen3"},
    "qwen3, yarn": {**QWEN, "model_type": "qwen3", "rope_scaling": YARN},
    "experts": MOE,
    "experts, not normalised": {**MOE, "norm_topk_prob": False},
    "some sparse layers": {**MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2},
    "one dense layer": {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "gemma3": ARCHITECTURES["gemma3_text"],
    "gemma4": ARCHITECTURES["gemma4_text"],
    "gemma4, mixture": ARCHITECTURES["gemma4 mixture"],
    "gpt_oss": ARCHITECTURES["gpt_oss"],
    "glm4_moe": ARCHITECTURES["glm4_moe"],
    "deepseek_v2": ARCHITECTURES["deepseek_v2"],
    "deepseek_v2, groups": {
        **ARCHITECTURES["deepseek_v2"],
        "topk_method": "group_limited_greedy",
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": ARCHITECTURES["deepseek_v3"],
    "glm4_moe_lite": ARCHITECTURES["glm4_moe_lite"],
    "mimo": ARCHITECTURES["mimo"],
    "qwen3_5": ARCHITECTURES["qwen3_5"],
    "qwen3_5, mixture": ARCHITECTURES["qwen3_5 mixture"],
    "qwen3_next": ARCHITECTURES["qwen3_next"],
    "lfm2": ARCHITECTURES["lfm2"],
    "lfm2_moe": ARCHITECTURES["lfm2_moe"],
}
# (bits, group size, mode) by name.
PACKED: dict[str, tuple[int, int, str]] = {
    "4 bits by 64": (4, 64, "affine"),
    "4 bits by 32": (4, 32, "affine"),
    "8 bits by 64": (8, 64, "affine"),
    "6 bits by 32": (6, 32, "affine"),
    "mxfp4": (4, 32, "mxfp4"),
    "nvfp4": (4, 16, "nvfp4"),
}


def build_packed(config: dict[str, Any], name: str, seed: int = 0) -> Any:
    """A model with packed weights."""
    bits, group_size, mode = PACKED[name]
    model = build_model(config, seed)
    quantize(model, group_size=group_size, bits=bits, mode=mode)
    return model
