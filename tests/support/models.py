"""Random models of a few kilobytes, saved the way mlx-lm loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 320
EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

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
