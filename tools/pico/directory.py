"""The directory of a model in mlx-lm's own format, written from a trained model and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from tools.pico.markers import END

CONTEXT_TOKENS = 2048


def model_config(vocabulary_size: int, width: int, layers: int, end_token_id: int) -> dict[str, Any]:
    """The config.json of a qwen3 with tied embeddings and heads of 32, two query heads to a key head."""
    heads = width // 32
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary_size,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": end_token_id,
    }


def write_model(
    out: Path, model: Any, config: dict[str, Any], tokenizer: Tokenizer, chat_template: str
) -> None:
    """Write everything but the card into `out`, which is made if it is missing."""
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
