"""Small random checkpoints that see, on disk as they are published, from the cases in `data/`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.vision.make_cases import array_of

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
MARKERS = {
    "pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "lfm2_vl": [
        "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>",
        "<|img_row_1_col_2|>", "<|img_row_2_col_1|>", "<|img_row_2_col_2|>",
    ],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"],
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
    "qwen2_vl": ["<|image_pad|>"],
    "qwen2_5_vl": ["<|image_pad|>"],
    "qwen3_vl": ["<|image_pad|>"],
    "qwen3_vl_moe": ["<|image_pad|>"],
    "qwen3_5": ["<|image_pad|>"],
    "qwen3_5_moe": ["<|image_pad|>"],
    "internvl_chat": ["<IMG_CONTEXT>", "<img>", "</img>"],
}  # fmt: skip
"""Special tokens of each family, from the id of the first on."""


def case(name: str) -> dict[str, Any]:
    """One case of `data/`."""
    return dict(json.loads((DATA / f"{name}.json").read_text()))


def write(directory: Path, given: dict[str, Any], rename: Callable[[str], str] = lambda name: name) -> Path:
    """The checkpoint of a case in an empty directory; `rename` gives the published names of its arrays."""
    arrays = {
        rename(key): mx.array(array_of(key, shape, given["seed"]))
        for key, shape in given["shapes"].items()
        if not key.endswith("position_ids")
    }
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(given["config"]))
    (directory / "preprocessor_config.json").write_text(json.dumps(given["processor"]))
    write_tokenizer(directory, given["config"]["model_type"], given["token"])
    return directory


def write_tokenizer(directory: Path, family: str, first: int) -> None:
    """A tokenizer of one word an id, with the family's special tokens from the id `first` on."""
    special = MARKERS["pixtral" if family == "llava" else family]
    vocabulary = {f"w{id_}": id_ for id_ in range(90)} | {"\n": 88, "\n\n": 89}
    for place, name in enumerate(special):
        vocabulary = {word: id_ for word, id_ in vocabulary.items() if id_ != first + place} | {
            name: first + place
        }
    vocabulary = {word: id_ for word, id_ in vocabulary.items() if word not in ("w88", "w89")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def old_names(name: str) -> str:
    """Names of the same arrays in checkpoints of earlier years, and in those that mlx-vlm has converted."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.")


_CHAT = (
    (r"model\.vision_tower\.embeddings\.cls_token", "vision_model.embeddings.class_embedding"),
    (r"model\.vision_tower\.embeddings\.position_embeddings", "vision_model.embeddings.position_embedding"),
    (
        r"model\.vision_tower\.embeddings\.patch_embeddings\.projection",
        "vision_model.embeddings.patch_embedding",
    ),
    (r"model\.vision_tower\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.attention\.([qk])_norm\.", r".attn.\1_norm."),
    (r"\.lambda_(\d)", r".ls\1"),
    (r"model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
)


def internvl_chat(directory: Path, given: dict[str, Any]) -> Path:
    """The checkpoint of a case of `internvl` as OpenGVLab publishes it."""
    config = given["config"]
    vision = config["vision_config"]
    told = {
        **config,
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": {
            **vision,
            "model_type": "intern_vit_6b",
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
        },
        "downsample_ratio": 0.5,
        "max_dynamic_patch": 4,
        "use_thumbnail": True,
        "dynamic_image_size": True,
    }
    del told["text_config"], told["vision_config"]["attention_bias"], told["vision_config"]["use_qk_norm"]

    def rename(name: str) -> str:
        for pattern, replacement in _CHAT:
            name = re.sub(pattern, replacement, name)
        return old_names(name)

    write(directory, {**given, "config": told}, rename)
    arrays = dict(mx.load(str(directory / "model.safetensors")))  # type: ignore[arg-type]
    for name in [name for name in arrays if ".attention.q_proj." in name]:
        parts = [arrays.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        arrays[name.replace(".attention.q_proj.", ".attn.qkv.")] = mx.concatenate(parts)
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    return directory
