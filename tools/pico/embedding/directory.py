"""The directory of a small BERT as transformers and sentence-transformers read it, and its tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTEXT_TOKENS = 256
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

# Our names of a layer's parts, and BERT's.
_PARTS = {
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A WordPiece tokenizer in lower case that puts [CLS] and [SEP] around a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    # Every letter on its own too, so that any word in Latin script has tokens.
    alphabet = [chr(code) for code in range(33, 127)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Their places in the list of special tokens, which come first.
    cls, sep = _SPECIAL.index("[CLS]"), _SPECIAL.index("[SEP]")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def model_config(vocabulary_size: int, width: int, layers: int) -> dict[str, Any]:
    """The config.json of a BERT with heads of 32."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocabulary_size,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "hidden_act": "gelu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def write_model(out: Path, model: Any, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write everything but the card into `out`, which is made if it is missing."""
    out.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, mx.array] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, array in parameters.items():
        arrays |= _bert_arrays(name, array)
    mx.save_safetensors(str(out / "model.safetensors"), arrays, metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_json(out / "config.json", config)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name.strip('[]').lower()}_token": name for name in _SPECIAL},
            "model_max_length": CONTEXT_TOKENS,
        },
    )
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    _write_json(out / "modules.json", modules)
    _write_json(out / "sentence_bert_config.json", {"max_seq_length": CONTEXT_TOKENS, "do_lower_case": False})
    (out / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
    _write_json(out / "1_Pooling" / "config.json", pooling)


def _bert_arrays(name: str, array: mx.array) -> dict[str, mx.array]:
    """An array of our modules under the names of BERT's."""
    first, _, rest = name.partition(".")
    if first in ("word", "position", "token_type"):
        return {f"embeddings.{first}_embeddings.{rest}": array}
    if first == "norm":
        return {f"embeddings.LayerNorm.{rest}": array}
    _, index, part, kind = name.split(".")
    layer = f"encoder.layer.{index}"
    if part == "qkv":
        split = mx.split(array, 3, axis=0)
        return {
            f"{layer}.attention.self.{named}.{kind}": piece
            for named, piece in zip(("query", "key", "value"), split, strict=True)
        }
    return {f"{layer}.{_PARTS[part]}.{kind}": array}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
