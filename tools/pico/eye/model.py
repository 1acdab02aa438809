"""Pico-eye: the tower of InternVL in front of pico, and its directory in the format of OpenGVLab's checkpoints."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import AddedToken, Tokenizer

from tools.pico.directory import write_model
from tools.pico.eye.pictures import SIDE
from tools.pico.markers import END
from zmqengine.engine.vision.towers.internvit import InternVit
from zmqengine.pico import model_path

PATCH = 8
MERGE = 2
GRID = (SIDE // PATCH, SIDE // PATCH)
FEATURES = (SIDE // PATCH // MERGE) ** 2
FEATURE, BEGIN, CLOSE = "<IMG_CONTEXT>", "<img>", "</img>"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# A message's content is a text, or a list of parts as in OpenAI's API.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '<|user|>' }}"
    "{%- elif message.role == 'assistant' -%}{{ '<|assistant|>' }}"
    "{%- else -%}{{ '<|system|>' }}"
    "{%- endif -%}"
    "{%- if message.content is string -%}{{- message.content | trim -}}"
    "{%- else -%}"
    "{%- for part in message.content or [] -%}"
    "{%- if part.type in ('image', 'image_url') -%}{{ '<IMG_CONTEXT>' }}"
    "{%- else -%}{{- (part.text or '') | trim -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# Our names of the tower's arrays, and the published ones.
_NAMES = (
    ("start_token", "vision_model.embeddings.class_embedding"),
    ("position", "vision_model.embeddings.position_embedding"),
    ("patch.", "vision_model.embeddings.patch_embedding."),
    ("layers.", "vision_model.encoder.layers."),
    (".qkv.", ".attn.qkv."),
    (".out.", ".attn.proj."),
    (".up.", ".mlp.fc1."),
    (".down.", ".mlp.fc2."),
    (".scale", ".ls"),
    ("linear1.", "mlp1.1."),
    ("linear2.", "mlp1.3."),
)


class PicoEye(Module):
    """A tower and a text model that are trained together."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        start = model_path()
        self.config, self.tokenizer = _config(start, width, layers), _tokenizer(start)
        self.tower = InternVit(self.config)
        text = dict(self.config["text_config"])
        self.language = qwen3.Model(qwen3.ModelArgs.from_dict(text))  # type: ignore[no-untyped-call]
        weights: Any = mx.load(str(start / "model.safetensors"))
        table = "model.embed_tokens.weight"
        # The markers begin as nothing that pico knows.
        weights[table] = mx.concatenate([weights[table], mx.zeros((3, text["hidden_size"]))])
        self.language.load_weights(list(weights.items()))

    def features(self, patches: mx.array) -> mx.array:
        """Features [pictures, FEATURES, width] of patches of uint8 [pictures, patches, numbers]."""
        colors = patches.astype(mx.float32).reshape(*patches.shape[:2], -1, 3) / 255
        normal = (colors - mx.array(MEAN)) / mx.array(STD)
        states = self.tower.start(self.tower.patch(normal.reshape(patches.shape)), GRID)
        for layer in self.tower.layers:
            states = layer(states)
        return self.tower.finish(states[:, 1:], GRID)

    def hidden(self, tokens: mx.array, features: mx.array, at: int) -> mx.array:
        """States of `tokens` [rows, length], with the features of each row's picture from place `at` on."""
        embedded = self.language.model.embed_tokens(tokens)
        end = at + features.shape[1]
        joined = mx.concatenate([embedded[:, :at], features, embedded[:, end:]], axis=1)
        states: mx.array = self.language.model(tokens, input_embeddings=joined)
        return states

    def write(self, out: Path) -> None:
        """Write all but the card into `out`, weights in half precision."""
        tower: dict[str, mx.array] = dict(tree_flatten(self.tower.parameters()))  # type: ignore[no-untyped-call]
        arrays = {_published(name): array for name, array in tower.items()}
        weight = "vision_model.embeddings.patch_embedding.weight"
        arrays[weight] = arrays[weight].reshape(-1, PATCH, PATCH, 3)
        text: dict[str, mx.array] = dict(tree_flatten(self.language.parameters()))
        arrays |= {f"language_model.{name}": array for name, array in text.items()}
        write_model(out, _Arrays(arrays), self.config, self.tokenizer, CHAT_TEMPLATE)
        processor = {"image_mean": MEAN, "image_std": STD, "resample": 3}
        (out / "preprocessor_config.json").write_text(
            json.dumps(processor, indent=2) + "\n", encoding="utf-8"
        )


class _Arrays:
    """Arrays as a model has them."""

    def __init__(self, arrays: dict[str, mx.array]) -> None:
        self._arrays = arrays

    def parameters(self) -> dict[str, mx.array]:
        """Each in half precision, by its published name."""
        return {name: array.astype(mx.float16) for name, array in self._arrays.items()}


def _published(name: str) -> str:
    if name.startswith("norm."):
        return name.replace("norm.", "mlp1.0.", 1)
    for own, other in _NAMES:
        if own.startswith(".") or name.startswith(own):
            name = name.replace(own, other, 1)
    return name


def _config(start: Path, width: int, layers: int) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((start / "config.json").read_text(encoding="utf-8"))
    text["vocab_size"] += 3
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "text_config": text,
        "vision_config": {
            "model_type": "intern_vit_6b",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 32,
            "image_size": SIDE,
            "patch_size": PATCH,
            "norm_type": "rms_norm",
            "layer_norm_eps": 1e-6,
            "qkv_bias": False,
        },
        "downsample_ratio": 1 / MERGE,
        "dynamic_image_size": False,
        "use_thumbnail": False,
        "max_position_embeddings": text["max_position_embeddings"],
        "tie_word_embeddings": True,
        "eos_token_id": text["eos_token_id"],
        "torch_dtype": "float16",
    }


def _tokenizer(start: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (FEATURE, BEGIN, CLOSE)])
    assert tokenizer.token_to_id(END) is not None
    return tokenizer
