"""Heads that draft, with random weights or with those of the model's last layer, and what they ought to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten

from tests.support.drafts import Widths, even_costs
from tests.support.engines import make_engine
from tests.support.models import VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.models.decoder import DecoderModel
from zmqengine.engine.models.draft_head import DraftHead
from zmqengine.engine.models.families import HEAD_FORMS, read_head, read_weights
from zmqengine.engine.models.families.heads import HeadForm
from zmqengine.engine.models.ops import Ops, PlainOps
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.head_drafts import HeadDrafts
from zmqengine.engine.speculation.speculator import Speculator


def head_module(model: Any, seed: int = 0) -> Any:
    """A head with random weights, of mlx-lm's modules, with a layer like the model's last one with attention."""
    text = getattr(model, "language_model", model)
    number = max(index for index, layer in enumerate(text.model.layers) if "self_attn" in layer)
    dim, eps = text.args.hidden_size, text.args.rms_norm_eps
    layer = type(text.model.layers[number])
    head: Any = Module()
    head.embedding_norm, head.hidden_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
    head.join = Linear(2 * dim, dim, bias=False)
    head.layer = layer(text.args, number) if form_of(model).numbered else layer(text.args)
    head.norm = RMSNorm(dim, eps)
    mx.random.seed(seed)
    named: Any = tree_flatten(head.parameters())
    head.load_weights(
        [
            (name, mx.random.normal(leaf.shape) * (0.3 if leaf.ndim > 1 else 0.05) + (leaf.ndim == 1))
            for name, leaf in named
        ]
    )
    mx.eval(head.parameters())
    return head


def form_of(model: Any) -> HeadForm:
    """The form of the heads of the model's family."""
    text = getattr(model, "language_model", model)
    return HEAD_FORMS[type(text).__module__.rpartition(".")[2]]


def right_model_and_head(config: dict[str, Any] = ARCHITECTURES["qwen3_5"]) -> tuple[Any, Any]:
    """A dense model whose last layer decides, and a head that has the same layer and so is mostly right.

    The head misses the first token alone: attention is made weak. Embeddings have a mean square of 1, so that the
    head's norm leaves them as they are.
    """
    model = build_model({**config, "tie_word_embeddings": False})
    text = getattr(model, "language_model", model)
    for layer in text.model.layers[:-1]:
        out = layer.linear_attn.out_proj if "linear_attn" in layer else layer.self_attn.o_proj
        out.weight = 0.001 * out.weight
        layer.mlp.down_proj.weight = 0.001 * layer.mlp.down_proj.weight
    attention, embedding = text.model.layers[-1].self_attn, text.model.embed_tokens
    attention.o_proj.weight = 0.2 * attention.o_proj.weight
    embedding.weight = mx.fast.rms_norm(embedding.weight, None, 0.0)
    head = head_module(model)
    dim = text.args.hidden_size
    halves = [mx.eye(dim), mx.zeros((dim, dim))]
    if form_of(model).hidden_first:
        halves.reverse()
    head.join.weight = mx.concatenate(halves, axis=-1)
    head.embedding_norm.weight = mx.ones(dim)
    named: Any = tree_flatten(text.model.layers[-1].parameters())
    head.layer.load_weights(named)
    head.norm.weight = text.model.norm.weight
    mx.eval(model.parameters(), head.parameters())
    return model, head


def tensors_of_head(model: Any, head: Any) -> dict[str, mx.array]:
    """The tensors of a model's head by its family's names, copied: reading a model joins some."""
    named: Any = tree_flatten(head.parameters())
    form = form_of(model)
    names = {part: getattr(form, part) for part in ("embedding_norm", "hidden_norm", "join", "norm")}

    def family_name(name: str) -> str:
        part, _, within = name.partition(".")
        return f"{form.layer}{within}" if part == "layer" else f"{names[part]}.{within}"

    return {family_name(name): mx.array(np.array(array)) for name, array in named}


def headed_runner(model: Any, head: Any, ops: Ops | None = None) -> SlotRunner:
    """A runner of the model that has the head; on MLX's operations, or on `ops`, which are replayed."""
    decoder = DecoderModel(read_weights(model), ops or PlainOps(), replays=ops is not None)
    weights = read_head(model, tensors_of_head(model, head))
    return SlotRunner(decoder, 2048, DraftHead(weights, decoder))


def headed_engine(
    model: Any,
    head: Any,
    *,
    drafts: type[HeadDrafts] = HeadDrafts,
    widths: Sequence[int] = (),
    **options: Any,
) -> Any:
    """An engine whose only source is the head; with `widths` its verify blocks follow no costs."""
    runner = headed_runner(model, head)
    source = drafts(runner, VOCAB_SIZE)
    speculator = Widths([], widths) if widths else Speculator([], even_costs())
    speculator.model = source
    return make_engine(runner, speculator=speculator, **options)


def expected_drafts(model: Any, head: Any, row: Row, count: int) -> list[int]:
    """The likeliest draft tokens of a head after the tokens of a row, computed from all of them at once."""
    text = getattr(model, "language_model", model)
    hidden = text.model(mx.array([row.tokens[:-1]]))
    tokens = list(row.tokens[1:])
    for _ in range(count):
        embedded = text.model.embed_tokens(mx.array([tokens]))
        pair = [head.embedding_norm(embedded), head.hidden_norm(hidden)]
        if form_of(model).hidden_first:
            pair.reverse()
        output = head.norm(head.layer(head.join(mx.concatenate(pair, axis=-1)), mask="causal"))
        last = output[:, -1:]
        tied = text.args.tie_word_embeddings
        logits = text.model.embed_tokens.as_linear(last) if tied else text.lm_head(last)
        tokens.append(int(np.argmax(np.array(logits[0, 0]))))
        hidden = mx.concatenate([hidden, last], axis=1)
    return tokens[len(row.tokens) - 1 :]
