"""Text part of the config of a checkpoint that sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEEING_TYPES = (
    "pixtral", "llava", "mistral3", "lfm2_vl", "idefics3", "smolvlm", "internvl_chat", "internvl", "qwen2_5_vl",
    "qwen3_vl",
)  # fmt: skip
"""Model types whose text part is one of mlx-lm's, but for positions."""
_TEXT_TYPES = {"qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def is_seeing(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model whose text part is built here."""
    return str(config.get("model_type", "")).replace("-", "_") in SEEING_TYPES


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that is of the text model, with its positions where every model of mlx-lm looks for them."""
    # Qwen2.5-VL was published with both parts in one.
    flat = config if config.get("model_type") == "qwen2_5_vl" else {}
    text = dict(config.get("text_config") or config.get("llm_config") or flat)
    # The defaults of transformers, where a config leaves out what equals them.
    usual = "mistral" if config["model_type"] in ("pixtral", "llava", "mistral3") else "llama"
    named = text.get("model_type") or usual
    text["model_type"] = _TEXT_TYPES.get(str(named), named)
    if "mrope_section" in (text.get("rope_scaling") or {}):
        # For text alone it is no scaling.
        del text["rope_scaling"]
    # transformers >= 5 nests what mlx-lm's Llama and Qwen2 read beside the other fields, or else replace by a default.
    nested = text.get("rope_parameters") or {}
    if "rope_theta" in nested:
        text.setdefault("rope_theta", nested["rope_theta"])
        if nested.get("rope_type", "default") != "default":
            text.setdefault("rope_scaling", nested)
    return text
