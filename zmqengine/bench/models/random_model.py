"""A model of random weights in mlx-lm's own directory format, for machines that cannot download one.

It costs the same as a trained model of its shape and writes nonsense. Two things are fixed. It never ends an answer,
so that every server makes exactly the requested number of tokens; and it only picks tokens of complete ASCII text, so
that no server's detokenizer holds text back. Both are done by one channel of the hidden state that is constant and
positive: embeddings set it, no layer writes to it, and the head weighs it with a large negative number for every
forbidden token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from zmqengine.bench.models.model_facts import CARD
from zmqengine.bench.models.model_shapes import SHAPES, ModelShape
from zmqengine.bench.models.random_tokenizer import CHAT_TEMPLATE, END, train_tokenizer, widened
from zmqengine.bench.targets.target import TargetError

TRAINED_MAX = 8192
"""Tokens that are trained; a larger vocabulary is composed of them, which takes no time."""
SHARD_BYTES_MAX = 2 * 10**9
CONSTANT_CHANNEL = 0

Weights = Iterator[tuple[str, mx.array]]


def make_model(
    shape_name: str, shape: ModelShape, out: Path, *, bits: int | None = None, seed: int = 0
) -> None:
    """Write a model of this shape into `out`, quantised to `bits` if given. The same seed gives the same model."""
    out.mkdir(parents=True, exist_ok=True)
    words = min(shape.vocabulary, shape.words)
    tokenizer = train_tokenizer(min(words, TRAINED_MAX), seed)
    if words > TRAINED_MAX:
        tokenizer = widened(tokenizer, words)
    tokenizer.save(str(out / "tokenizer.json"))
    mx.random.seed(seed)
    config = _config(shape, tokenizer)
    weights = _weights(shape, silent_ids(tokenizer, shape.vocabulary))
    if bits:
        config["quantization"] = {"group_size": 32 if shape.hidden % 64 else 64, "bits": bits}
        weights = _quantised(weights, **config["quantization"])
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
        "parameters": shape.parameters,
        "dtype": shape.dtype,
        "bits": bits,
        "seed": seed,
    }
    _write_json(out / CARD, card)


def model_directory_of(name: str, models: Path) -> Path:
    """The directory in `models` of the model `SHAPE`, `SHAPE-4bit` or `SHAPE-8bit`, made if it does not exist.

    Raises TargetError for another name.
    """
    path = models / name
    shape, _, bits = name.partition("-")
    if shape not in SHAPES or bits not in ("", "4bit", "8bit"):
        raise TargetError(f"no model {name}: a shape ({', '.join(SHAPES)}), and -4bit or -8bit behind it")
    if not (path / CARD).is_file():
        make_model(shape, SHAPES[shape], path, bits=int(bits[0]) if bits else None)
    return path


def silent_ids(tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """Forbidden ids: special tokens, ids without a token, and tokens that are not complete ASCII text."""
    texts = [tokenizer.decode([id_], skip_special_tokens=True) for id_ in range(tokenizer.get_vocab_size())]
    speaking = {id_ for id_, text in enumerate(texts) if text.isascii() and text.strip().isalpha()}
    return [id_ for id_ in range(vocabulary) if id_ not in speaking]


def _weights(shape: ModelShape, silent: list[int]) -> Weights:
    """Tensors of mlx-lm's Llama or Qwen3-MoE, one at a time, so that an 8B model takes little memory to make."""
    dtype, hidden, head = getattr(mx, shape.dtype), shape.hidden, shape.hidden // shape.heads
    # Dimensions before those of a product.
    experts = (shape.experts,) if shape.experts else ()

    def linear(*dims: int) -> mx.array:
        return mx.random.normal(dims, scale=dims[-1] ** -0.5).astype(dtype)

    def into_hidden(*dims: int) -> mx.array:
        weight = linear(*dims[:-1], hidden, dims[-1])
        weight[..., CONSTANT_CHANNEL, :] = 0
        return weight

    ones = mx.ones((hidden,), dtype=dtype)
    embedding = linear(shape.vocabulary, hidden)
    embedding[:, CONSTANT_CHANNEL] = 1
    yield "model.embed_tokens.weight", embedding
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", linear(shape.heads * head, hidden)
        yield f"{name}.self_attn.k_proj.weight", linear(shape.kv_heads * head, hidden)
        yield f"{name}.self_attn.v_proj.weight", linear(shape.kv_heads * head, hidden)
        yield f"{name}.self_attn.o_proj.weight", into_hidden(shape.heads * head)
        mlp = f"{name}.mlp.switch_mlp" if experts else f"{name}.mlp"
        yield f"{mlp}.gate_proj.weight", linear(*experts, shape.intermediate, hidden)
        yield f"{mlp}.up_proj.weight", linear(*experts, shape.intermediate, hidden)
        yield f"{mlp}.down_proj.weight", into_hidden(*experts, shape.intermediate)
        if experts:
            yield f"{name}.mlp.gate.weight", linear(*experts, hidden)
            for norm in ("q_norm", "k_norm"):
                yield f"{name}.self_attn.{norm}.weight", mx.ones((head,), dtype=dtype)
        yield f"{name}.input_layernorm.weight", ones
        yield f"{name}.post_attention_layernorm.weight", ones
    yield "model.norm.weight", ones
    head_weight = linear(shape.vocabulary, hidden)
    head_weight[:, CONSTANT_CHANNEL] = 0
    ids = mx.array(silent)
    head_weight[ids] = 0
    head_weight[ids, CONSTANT_CHANNEL] = -1000
    yield "lm_head.weight", head_weight


def _quantised(weights: Weights, group_size: int, bits: int) -> Weights:
    for name, weight in weights:
        if weight.ndim == 1:
            yield name, weight
            continue
        packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
        stem = name.removesuffix(".weight")
        yield f"{stem}.weight", packed
        yield f"{stem}.scales", scales
        yield f"{stem}.biases", biases


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


def _config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, Any]:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": shape.dtype,
        "eos_token_id": tokenizer.token_to_id(END),
        **(experts if shape.experts else {}),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
