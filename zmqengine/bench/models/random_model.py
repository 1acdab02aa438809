"""A model of random weights in mlx-lm's own directory format, for machines that cannot download one.

It costs the same as a trained model of its shape and writes nonsense. Two things are fixed. It never ends an answer,
so that every server makes exactly the requested number of tokens; and it only picks tokens of complete ASCII text, so
that no server's detokenizer holds text back. Both are done by one channel of the hidden state that is constant and
positive: embeddings set it, no layer writes to it, and the head weighs it with a large negative number for every
forbidden token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from zmqengine.bench.models.model_facts import CARD
from zmqengine.bench.models.model_shapes import SHAPES, ModelShape
from zmqengine.bench.models.random_tokenizer import CHAT_TEMPLATE, END, train_tokenizer, widened
from zmqengine.bench.targets.target import TargetError

TRAINED_MAX = 8192
"""Tokens that are trained; a larger vocabulary is composed of them, which takes no time."""
SHARD_BYTES_MAX = 2 * 10**9
CONSTANT_CHANNEL = 0
# Of a tied embedding: with hidden states of 1 the distance is that of some 30 standard deviations of a logit.
_SPEAKING = 30

Weights = Iterator[tuple[str, mx.array]]


def make_model(
    shape_name: str, shape: ModelShape, out: Path, *, bits: int | None = None, seed: int = 0
) -> int:
    """Write a model of this shape into `out`, quantised to `bits` if given; returns the number of its weights.

    The same seed gives the same model.
    """
    out.mkdir(parents=True, exist_ok=True)
    words = min(shape.vocabulary, shape.words)
    tokenizer = train_tokenizer(min(words, TRAINED_MAX), seed)
    if words > TRAINED_MAX:
        tokenizer = widened(tokenizer, words)
    tokenizer.save(str(out / "tokenizer.json"))
    mx.random.seed(seed)
    config = {**shape.config, "torch_dtype": shape.dtype, "eos_token_id": tokenizer.token_to_id(END)}
    if bits or shape.packed_experts:
        config["quantization"] = _quantization(shape, bits)
    counted = [0]
    weights = _weights(shape, silent_ids(tokenizer, shape.vocabulary), bits, counted)
    _write_shards(out, weights)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": shape.context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    card = {
        "shape": shape_name,
        "model_type": config["model_type"],
        "parameters": counted[0],
        "dtype": shape.dtype,
        "bits": bits,
        "seed": seed,
    }
    _write_json(out / CARD, card)
    return counted[0]


def model_directory_of(name: str, models: Path) -> Path:
    """The directory in `models` of the model `SHAPE`, `SHAPE-4bit` or `SHAPE-8bit`, made if it does not exist.

    Raises TargetError for another name.
    """
    path = models / name
    shape, bits = name, ""
    if name.endswith(("-4bit", "-8bit")):
        shape, _, bits = name.rpartition("-")
    if shape not in SHAPES:
        raise TargetError(f"no model {name}: a shape ({', '.join(SHAPES)}), and -4bit or -8bit behind it")
    if not (path / CARD).is_file():
        make_model(shape, SHAPES[shape], path, bits=int(bits[0]) if bits else None)
    return path


def silent_ids(tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Forbidden ids: special tokens, ids without a token, and tokens that are not complete ASCII text."""
    texts = [tokenizer.decode([id_], skip_special_tokens=True) for id_ in range(tokenizer.get_vocab_size())]
    speaking = {id_ for id_, text in enumerate(texts) if text.isascii() and text.strip().isalpha()}
    return [id_ for id_ in range(vocabulary) if id_ not in speaking]


def _weights(shape: ModelShape, silent: list[int], bits: int | None, counted: list[int]) -> Weights:
    """Tensors of mlx-lm's model, one at a time, so that a large one takes little memory to make; `counted`: weights so
    far."""
    module = import_module(f"mlx_lm.models.{shape.config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(shape.config)))
    # Its own weights are never computed.
    tensors: Any = tree_flatten(model.parameters())
    is_tied = not any(name.endswith("lm_head.weight") for name, _ in tensors)
    for name, tensor in tensors:
        weight = _drawn(name, tensor.shape, silent, is_tied=is_tied).astype(getattr(mx, shape.dtype))
        counted[0] += weight.size
        stem = name.removesuffix(".weight")
        owner = _module(model, stem)
        is_packed = name.endswith(".weight") and hasattr(owner, "to_quantized")
        if is_packed and shape.packed_experts and tensor.ndim == 3:
            yield from zip((name, f"{stem}.scales"), mx.quantize(weight, **_MXFP4), strict=True)
        elif is_packed and bits:
            names = (name, f"{stem}.scales", f"{stem}.biases")
            yield from zip(names, mx.quantize(weight, **_packing(shape, bits)), strict=True)
        else:
            yield name, weight


_MXFP4: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
# Products whose outputs are added to the hidden states.
_INTO_HIDDEN = (
    "o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "per_layer_projection.weight",
    "o_proj.bias", "out_proj.bias", "down_proj.bias",
)  # fmt: skip


def _drawn(name: str, dims: tuple[int, ...], silent: list[int], *, is_tied: bool) -> mx.array:
    """A tensor by its name in the model: products of about unit variance, and neutral numbers elsewhere."""
    if "A_log" in name:
        return mx.log(mx.random.uniform(1, 16, dims))
    if len(dims) == 1 or name.endswith((".bias", "sinks", "e_score_correction_bias")):
        return mx.zeros(dims) if _is_neutral_at_zero(name) else mx.ones(dims)
    weight = mx.random.normal(dims, scale=math.prod(dims[1:]) ** -0.5 if "conv" in name else dims[-1] ** -0.5)
    if name.endswith("embed_tokens.weight"):
        weight[:, CONSTANT_CHANNEL] = 1
        if is_tied:
            # The head too: the others are above the forbidden ones, whose own hidden states are positive as well.
            weight[:, CONSTANT_CHANNEL] = _SPEAKING
            weight[mx.array(silent), CONSTANT_CHANNEL] = 1
    elif name.endswith("lm_head.weight"):
        ids = mx.array(silent)
        weight[:, CONSTANT_CHANNEL] = 0
        weight[ids] = 0
        weight[ids, CONSTANT_CHANNEL] = -1000
    elif name.endswith(_INTO_HIDDEN):
        weight[..., CONSTANT_CHANNEL, :] = 0
    return weight


def _is_neutral_at_zero(name: str) -> bool:
    return not name.endswith("norm.weight") and any(part in name for part in ("bias", "sinks"))


def _module(model: Any, path: str) -> Any:
    """The module at a path of names and numbers; None for a path that ends elsewhere."""
    owner = model
    for part in path.split("."):
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part, None)
    return owner


def _packing(shape: ModelShape, bits: int) -> dict[str, Any]:
    return {"group_size": 32 if shape.config["hidden_size"] % 64 else 64, "bits": bits}


def _quantization(shape: ModelShape, bits: int | None) -> dict[str, Any]:
    return _packing(shape, bits) if bits else _MXFP4


def _write_shards(out: Path, weights: Weights) -> None:
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(weights), 1):
        name = f"model-{number:05d}.safetensors"
        mx.save_safetensors(str(out / name), shard, metadata={"format": "mlx"})
        places |= dict.fromkeys(shard, name)
        total += sum(weight.nbytes for weight in shard.values())
    _write_json(
        out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places}
    )


def _shards(weights: Weights) -> Iterator[dict[str, mx.array]]:
    shard: dict[str, mx.array] = {}
    held = 0
    for name, weight in weights:
        mx.eval(weight)
        if shard and held + weight.nbytes > SHARD_BYTES_MAX:
            yield shard
            shard, held = {}, 0
        shard[name] = weight
        held += weight.nbytes
    yield shard


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
