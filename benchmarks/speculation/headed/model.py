"""Builds the model: what pico computes, at the cost of a larger model of Qwen3.5's shape.

Pico's hidden state is the beginning of a wider one, which is 0 elsewhere, and so are the weights between the two.
Pico's layers are those with attention; the layers with the gated delta rule between them add nothing. All of it is
computed.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5
from tokenizers import Tokenizer

from benchmarks.speculation.headed import HEAD_FILE
from tools.pico.corpus import StoryDocument
from tools.pico.draw import Draw
from tools.pico.markers import END
from tools.pico.story import tell
from tools.pico.tokens import encode
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.pico import model_path

LAYERS_APART = 4
"""Layers to each one with attention, as in the models of the family."""
WIDER = 1
"""Width of the model in widths of pico."""
# Tokens of a story that are given.
_OPENING_TOKENS = 8


def config(wider: int = WIDER) -> dict[str, Any]:
    """The model's config."""
    pico = json.loads((model_path() / "config.json").read_text())
    heads, dim = wider * pico["num_attention_heads"], pico["head_dim"]
    return {
        **{name: value for name, value in pico.items() if name not in ("rope_theta", "hidden_act")},
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "hidden_size": wider * pico["hidden_size"],
        "intermediate_size": wider * pico["intermediate_size"],
        "num_hidden_layers": LAYERS_APART * pico["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": wider * pico["num_key_value_heads"],
        # As a norm divides by the mean of all squares, most of which are 0.
        "rms_norm_eps": pico["rms_norm_eps"] / wider,
        "full_attention_interval": LAYERS_APART,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": heads // 2,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default",
            "rope_theta": pico["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
    }


def build(wider: int = WIDER) -> Any:
    """The model without its head, as mlx-lm loads one."""
    told = config(wider)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(told))  # type: ignore[no-untyped-call]
    mx.random.seed(0)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, weight in weights.items():
        if name.endswith(("linear_attn.out_proj.weight", "mlp.down_proj.weight")):
            weights[name] = mx.zeros_like(weight)
    pico: Any = mx.load(str(model_path() / "model.safetensors"))
    heads = told["num_attention_heads"] // wider
    for name, weight in pico.items():
        place = _place(name)
        weights[place] = _widened(place, _gated(name, weight, heads), weights[place].shape)
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model


def head_module(model: Any) -> Any:
    """A head of the model's shape, of mlx-lm's modules by their published names."""
    text = model.language_model
    dim, eps = text.args.hidden_size, text.args.rms_norm_eps
    head: Any = Module()  # type: ignore[no-untyped-call]
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = RMSNorm(dim, eps), RMSNorm(dim, eps)
    head.fc = Linear(2 * dim, dim, bias=False)
    head.layers = [qwen3_5.DecoderLayer(text.args, LAYERS_APART - 1)]
    head.norm = RMSNorm(dim, eps)
    return head


def head_tensors(model: Any) -> dict[str, mx.array]:
    """The tensors of the trained head by their names within it, as wide as the model."""
    stored: Any = mx.load(str(HEAD_FILE))
    tensors = {name.removeprefix("mtp."): array.astype(mx.float32) for name, array in stored.items()}
    named: Any = tree_flatten(head_module(model).parameters())
    return {name: _widened(name, tensors[name], leaf.shape) for name, leaf in named}


def requests(streams: int, seed: int, tokens: int, sampling: Sampling) -> list[RowRequest]:
    """Openings of held-out stories, each to be told to its end."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    draw = Draw(seed, "held_out")
    stories = [encode(tokenizer, StoryDocument(tell(draw)))[0] for _ in range(streams)]
    return [
        RowRequest(
            row,
            story[:_OPENING_TOKENS],
            tokens,
            sampling=sampling,
            seed=1000 * seed + row,
            stop_token_ids=frozenset(tokenizer.encode(END).ids),
        )
        for row, story in enumerate(stories)
    ]


def _place(name: str) -> str:
    """The name that one of pico's weights has in the model."""
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(LAYERS_APART * int(parts[2]) + LAYERS_APART - 1)
    return ".".join(["language_model", *parts])


def _gated(name: str, weight: mx.array, heads: int) -> mx.array:
    """One of pico's weights where attention has gates: all are half open, and the output is twice as large."""
    if name.endswith("q_proj.weight"):
        queries = weight.reshape(heads, -1, weight.shape[-1])
        return mx.concatenate([queries, mx.zeros_like(queries)], axis=1).reshape(-1, weight.shape[-1])
    return 2 * weight if name.endswith("o_proj.weight") else weight


def _widened(name: str, weight: mx.array, shape: tuple[int, ...]) -> mx.array:
    """A weight in the beginning of a wider one. A norm of hidden states, most of them 0, has the same results."""
    if name == "fc.weight":
        halves = mx.split(weight, 2, axis=-1)
        return mx.concatenate([_widened("", half, (shape[0], shape[1] // 2)) for half in halves], axis=-1)
    if weight.ndim == 1:
        weight = weight * (weight.shape[0] / shape[0]) ** 0.5
    return mx.pad(weight, [(0, wide - narrow) for wide, narrow in zip(shape, weight.shape, strict=True)])
