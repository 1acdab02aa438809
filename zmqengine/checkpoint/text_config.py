"""Text part of the config of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEEING_TYPES = (
    "pixtral", "llava", "mistral3", "lfm2_vl", "idefics3", "smolvlm", "internvl_chat", "internvl", "qwen2_vl",
    "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Model types whose text part is one of mlx-lm's, but for positions."""
WHOLE_TYPES = ("qwen3_5", "qwen3_5_moe")
"""Model types whose checkpoints mlx-lm reads itself, in every published form; only positions are missing."""
_FLAT_TYPES = ("qwen2_vl", "qwen2_5_vl")
"""Model types that were published with both parts in one config."""
_TEXT_TYPES = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip


def is_seeing(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model whose text part is built here."""
    return str(config.get("model_type", "")).replace("-", "_") in SEEING_TYPES


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that is of the text model, with its positions where every model of mlx-lm looks for them."""
    flat = config if config.get("model_type") in _FLAT_TYPES else {}
    text = dict(config.get("text_config") or config.get("llm_config") or flat)
    # The defaults of transformers, where a config leaves out what equals them.
    usual = "mistral" if config["model_type"] in ("pixtral", "llava", "mistral3") else "llama"
    named = text.get("model_type") or usual
    text["model_type"] = _TEXT_TYPES.get(str(named), named)
    if "mrope_section" in (text.get("rope_scaling") or {}):
        # For text alone it is no scaling.
        del text["rope_scaling"]
    if text["model_type"] == "qwen3_moe":
        # transformers >= 5 leaves out what every model of the family has, and renames the number.
        text = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, **text}
        text.setdefault("num_experts", text.get("num_local_experts"))
    # transformers >= 5 nests what mlx-lm's Llama and Qwen2 read beside the other fields, or else replace by a default.
    nested = text.get("rope_parameters") or {}
    if "rope_theta" in nested:
        text.setdefault("rope_theta", nested["rope_theta"])
        if nested.get("rope_type", "default") != "default":
            text.setdefault("rope_scaling", nested)
    return text


def number_type(directory: Path | None) -> str:
    """Type of the numbers of a text model, such as `bfloat16`: that of most checkpoints where its config names none."""
    try:
        config = json.loads((directory or Path()).joinpath("config.json").read_text(encoding="utf-8"))
        config = {**config, **config.get("text_config", {})}
        return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    except (OSError, ValueError, TypeError, AttributeError):
        return "bfloat16"
