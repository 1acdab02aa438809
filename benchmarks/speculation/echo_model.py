"""A model that really repeats what it was told, changing what is marked. Its weights are built, not trained.

A text is a list of words, some of them marked. Asked for it again, the model says it with the marks gone, as somebody
does who is asked for the same document with some fields changed. One attention head looks back by exactly the length of
the text, as rotary positions let it, and writes what stands there beside the token that was read; the output layer
names that word without its mark. All other weights are random and are computed, but what they say is left out: a step
costs what it costs in a model of this shape.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

BEGIN, AGAIN, END = 0, 1, 2
FIRST_WORD, WORDS = 3, 500
VOCAB_SIZE = FIRST_WORD + 2 * WORDS
MARKED_SHARE = 0.04
_HEAD = 64
# How much the place that is looked for stands out from its neighbours, in logits.
_SHARPNESS = 40.0


def document(draw: random.Random, words: int, marked_share: float = MARKED_SHARE) -> list[int]:
    """A list of words, each of them marked with this chance."""
    return [
        FIRST_WORD + draw.randrange(WORDS) + (WORDS if draw.random() < marked_share else 0)
        for _ in range(words)
    ]


def prompt(text: list[int]) -> list[int]:
    """What asks for a document again."""
    return [BEGIN, *text, AGAIN]


def answer(text: list[int]) -> list[int]:
    """The document without its marks, and the end."""
    return [*((word - FIRST_WORD) % WORDS + FIRST_WORD for word in text), END]


def config(hidden: int = 256, layers: int = 4) -> dict[str, Any]:
    """The model's configuration in mlx-lm's form. `hidden` is a multiple of 64, and at least 192."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // _HEAD, "num_key_value_heads": hidden // _HEAD, "head_dim": _HEAD,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip


def build(words: int, *, hidden: int = 256, layers: int = 4, seed: int = 0) -> Any:
    """A model for documents of so many words."""
    model = llama.Model(llama.ModelArgs.from_dict(config(hidden, layers)))  # type: ignore[no-untyped-call]
    mx.random.seed(seed)
    leaves: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    weights = {name: mx.random.normal(leaf.shape) * 0.02 if leaf.ndim > 1 else leaf for name, leaf in leaves}
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(weights[name])
    # A token is a constant and its code; what is looked up goes beside it.
    codes = mx.where(mx.random.uniform(shape=(VOCAB_SIZE, _HEAD)) < 0.5, -1.0, 1.0)
    own, found = slice(1, 1 + _HEAD), slice(1 + _HEAD, 1 + 2 * _HEAD)
    embedding = mx.zeros((VOCAB_SIZE, hidden))
    embedding[:, 0] = 1.0
    embedding[:, own] = codes
    # What the norm before a layer divides by.
    size = ((1 + _HEAD) / hidden) ** 0.5
    attention = "model.layers.0.self_attn"
    weights["model.embed_tokens.weight"] = embedding
    weights[f"{attention}.q_proj.weight"] = _from_constant(hidden, _query(0) * _SHARPNESS * size)
    weights[f"{attention}.k_proj.weight"] = _from_constant(hidden, _query(words) * size)
    weights[f"{attention}.v_proj.weight"] = _moved(hidden, slice(0, _HEAD), own) * size
    weights[f"{attention}.o_proj.weight"] = _moved(hidden, found, slice(0, _HEAD))
    head = mx.zeros((VOCAB_SIZE, hidden))
    head[FIRST_WORD : FIRST_WORD + WORDS, found] = (
        codes[FIRST_WORD : FIRST_WORD + WORDS] + codes[FIRST_WORD + WORDS :]
    )
    head[END, found] = codes[AGAIN] * 1.5
    weights["lm_head.weight"] = head
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _query(back: int) -> mx.array:
    """A vector that, turned by its place as `mlx_lm.models.llama` turns it, is the same as one `back` places later."""
    half = _HEAD // 2
    angles = back * 10000.0 ** (-mx.arange(half) / half)
    return mx.concatenate([mx.cos(angles), mx.sin(angles)])


def _from_constant(hidden: int, vector: mx.array) -> mx.array:
    """A projection whose first head is always `vector`."""
    weights = mx.zeros((hidden, hidden))
    weights[:_HEAD, 0] = vector
    return weights


def _moved(hidden: int, to: slice, source: slice) -> mx.array:
    """A projection that moves one part of its input to another place."""
    weights = mx.zeros((hidden, hidden))
    weights[to, source] = mx.eye(_HEAD)
    return weights
