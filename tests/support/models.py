"""Random models of a few kilobytes, saved the way mlx-lm loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from zmqengine.bench.models.small_models import (
    HYBRID,
    LLAMA,
    MAMBA,
    MIXTURE,
    SLIDING,
    VOCAB_SIZE,
    build_model,
)

__all__ = ["HYBRID", "LLAMA", "MAMBA", "MIXTURE", "SLIDING", "VOCAB_SIZE", "build_model", "save_model"]

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(directory: Path, config: Mapping[str, Any] = LLAMA, seed: int = 0) -> Path:
    """Write such a model with a small tokenizer and a chat template into `directory`, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    model = build_model(config, seed)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of at most VOCAB_SIZE words that begins every text with <|begin|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", EOS, "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat and the dog ran to the red hat in the sun. one two three four five. "
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer
