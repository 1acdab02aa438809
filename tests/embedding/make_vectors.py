"""Vectors of small random checkpoints by transformers and torch: `python -m tests.embedding.make_vectors`.

It needs an environment with both. What it writes into `data/` has no arrays: those follow from their names and a seed.
With `--seed N` it prints the cases of another seed, as texts and arrays are chosen by it.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
MODERN: dict[str, Any] = {
    **SMALL, "max_position_embeddings": 256, "local_attention": 16, "pad_token_id": 0, "cls_token_id": 1,
    "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
XLM: dict[str, Any] = {**SMALL, "max_position_embeddings": 130, "type_vocab_size": 1, "pad_token_id": 1}
# Class of transformers, its config, and how its states are pooled; None: the logits of its head.
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "bert-mean": ("BertModel", {**SMALL, "max_position_embeddings": 128}, "mean"),
    "bert-cls-tanh": ("BertModel", {**SMALL, "max_position_embeddings": 128, "hidden_act": "gelu_new"}, "cls"),
    "xlm-roberta-cls": ("XLMRobertaModel", XLM, "cls"),
    "modernbert-mean": ("ModernBertModel", MODERN, "mean"),
    "modernbert-biased-cls": (
        "ModernBertModel", {**MODERN, "attention_bias": True, "mlp_bias": True, "norm_bias": True}, "cls"
    ),
    "nomic-mean": ("NomicBertModel", {**SMALL, "max_position_embeddings": 128}, "mean"),
    "gemma3-two-way-mean": (
        "Gemma3TextModel",
        {**DECODER, "max_position_embeddings": 512, "use_bidirectional_attention": True, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 8},
        "mean",
    ),
    "bert-score": (
        "BertForSequenceClassification", {**SMALL, "max_position_embeddings": 128, "num_labels": 1}, None
    ),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**XLM, "num_labels": 1}, None),
    "modernbert-score": (
        "ModernBertForSequenceClassification", {**MODERN, "num_labels": 3, "classifier_pooling": "mean"}, None
    ),
    "qwen3-last": ("Qwen3ForCausalLM", {**DECODER, "max_position_embeddings": 512}, "lasttoken"),
    "llama-mean": ("LlamaForCausalLM", {**DECODER, "max_position_embeddings": 512}, "mean"),
    "lfm2-mean": (
        "Lfm2ForCausalLM",
        {**{k: v for k, v in DECODER.items() if k != "head_dim"}, "max_position_embeddings": 512,
         "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
         "block_ff_dim": 48, "conv_bias": False, "conv_dim": 32, "conv_dim_out": 32, "block_dim": 32,
         "num_heads": 4, "block_multiple_of": 16},
        "mean",
    ),
}  # fmt: skip


def array_of(name: str, shape: list[int], seed: int) -> np.ndarray:
    """The array that a checkpoint has under this name: noise, around 1 for the scale of a norm."""
    made = np.random.default_rng([zlib.crc32(name.encode()), seed]).normal(0, 0.15, shape).astype(np.float32)
    is_scale = "norm" in name.lower() and name.endswith("weight")
    return made + 1 if is_scale else made


def texts_of(seed: int) -> tuple[list[list[int]], list[int]]:
    """Texts of many lengths, and where the second part of some begins."""
    draw = np.random.default_rng(seed)
    lengths = (5, 17, 1, 60, 17, 100, 3)
    return [draw.integers(3, 90, length).tolist() for length in lengths], [0, 8, 0, 21, 0, 50, 2]


def make(name: str, seed: int) -> dict[str, Any]:
    """One case: config, shapes of the arrays, texts and their vectors."""
    import torch  # type: ignore[import-not-found]
    import transformers

    cls, fields, pooling = CASES[name]
    kind = getattr(transformers, cls)
    config = kind.config_class(**fields)
    model = kind(config).eval()
    state = model.state_dict()
    tied = {"lm_head.weight"} if fields.get("tie_word_embeddings") else set()
    shapes = {key: list(value.shape) for key, value in state.items() if key not in tied}
    model.load_state_dict(
        {key: torch.tensor(array_of(key, shape, seed)) for key, shape in shapes.items()}, strict=False
    )
    model.tie_weights()
    texts, second = texts_of(seed)
    if pooling is not None:
        second = [0] * len(texts)
    vectors = []
    for text, where in zip(texts, second, strict=True):
        ids = torch.tensor([text])
        more = {}
        if cls.startswith("Bert"):
            more["token_type_ids"] = torch.tensor([[int(0 < where <= place) for place in range(len(text))]])
        with torch.no_grad():
            made = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                output_hidden_states=pooling is not None,
                **more,
            )
        if pooling is None:
            vectors.append(made.logits[0])
            continue
        hidden = made.last_hidden_state[0] if "last_hidden_state" in made else made.hidden_states[-1][0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[pooling]
        vectors.append(pooled / pooled.norm())
    written = {**config.to_dict(), "architectures": [cls]}
    return {
        "seed": seed,
        "config": {key: value for key, value in written.items() if value is not None},
        "pooling": pooling,
        "shapes": shapes,
        "texts": texts,
        "second": second,
        "vectors": [[round(float(number), 7) for number in vector] for vector in vectors],
    }


def main() -> None:
    """Write every case, or print those of another seed."""
    if sys.argv[1:2] == ["--seed"]:
        seed = int(sys.argv[2])
        print(json.dumps({name: make(name, seed) for name in CASES}))
        return
    for name in CASES:
        (DATA / f"{name}.json").write_text(json.dumps(make(name, 0)) + "\n")


if __name__ == "__main__":
    main()
