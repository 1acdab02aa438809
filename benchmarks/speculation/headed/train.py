"""Train the head with MLX: `python -m benchmarks.speculation.headed.train`. It takes about five minutes on one core.

The head learns what pico says next, not what the corpus has: a draft is right where pico agrees. It learns as it
drafts: from its own output, several tokens deep, with the keys and values that it would then have.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from benchmarks.speculation.headed import HEAD_FILE
from benchmarks.speculation.headed.model import build, head_module
from tools.pico.batches import Batch, batches
from tools.pico.corpus import documents, sample
from tools.pico.directory import CONTEXT_TOKENS
from tools.pico.optimizer import make_optimizer
from tools.pico.training import Report, plan_options
from zmqengine.pico import model_path

_REPORT_STEPS = 50
_HELD_OUT_DOCUMENTS = 100


@dataclass(frozen=True)
class Plan:
    """Options of a training run; the defaults made the bundled head."""

    steps: int = 550
    batch_tokens: int = 768
    depth: int = 3
    seed: int = 1
    matrix_rate: float = 0.015
    other_rate: float = 0.004


def train(plan: Plan, report: Report) -> Any:
    """A trained head. `report` is called with a line every 50 steps."""
    pico: Any = load_model(model_path())[0]
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    mx.random.seed(plan.seed)
    model = build(1)
    head = head_module(model)
    # It begins as the model's last layer.
    head.layers[0].load_weights(list(tree_flatten(model.language_model.layers[-1].parameters())))
    optimizer = make_optimizer(plan.matrix_rate, plan.other_rate, plan.steps, 0.02)
    loss_and_gradients = nn.value_and_grad(head, _loss)  # type: ignore[attr-defined]
    stream = batches(documents("train", plan.seed), tokenizer, plan.batch_tokens, CONTEXT_TOKENS)
    began_s = time.monotonic()
    for number, batch in enumerate(islice(stream, plan.steps), start=1):
        value, gradients = loss_and_gradients(head, pico, batch, plan.depth)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(head, gradients)
        mx.eval(value, head.parameters(), optimizer.state)
        if number % _REPORT_STEPS == 0:
            report(f"step {number}/{plan.steps}  loss {value.item():.4f}  {time.monotonic() - began_s:.0f} s")
    shares = ", ".join(f"{share:.1%}" for share in agreement(head, pico, tokenizer, plan))
    report(f"held-out: the likeliest token is pico's for {shares} of tokens, by depth")
    return head


def agreement(head: Any, pico: Any, tokenizer: Tokenizer, plan: Plan) -> list[float]:
    """The share of held-out tokens whose likeliest is pico's, for each depth."""
    alike, count = [0] * plan.depth, [0] * plan.depth
    for batch in batches(sample("held_out", plan.seed, _HELD_OUT_DOCUMENTS), tokenizer, 4096, CONTEXT_TOKENS):
        for depth, (theirs, ours) in enumerate(_logits(head, pico, batch, plan.depth)):
            alike[depth] += int(np.sum(np.array(mx.argmax(theirs, axis=-1) == mx.argmax(ours, axis=-1))))
            count[depth] += theirs.shape[0]
    return [right / of for right, of in zip(alike, count, strict=True)]


def _loss(head: Any, pico: Any, batch: Batch, depth: int) -> mx.array:
    """The mean cross entropy with pico's distribution, in nats."""
    losses = [
        nn.losses.cross_entropy(ours, mx.softmax(theirs, axis=-1), reduction="mean")
        for theirs, ours in _logits(head, pico, batch, depth)
    ]
    return mx.mean(mx.stack(losses))


def _logits(head: Any, pico: Any, batch: Batch, depth: int) -> list[tuple[mx.array, mx.array]]:
    """Logits of pico and of the head for the learnt tokens, for each depth."""
    inputs = mx.array(batch.inputs)
    hidden = mx.stop_gradient(pico.model(inputs))
    embedding = pico.model.embed_tokens
    places, within = batch.places, batch.places % inputs.shape[1]
    # The pair of hidden state t and token t + 1 foretells what pico says after token t + 1.
    outputs = unrolled(head, embedding(inputs[:, 1:]), hidden[:, :-1], depth)
    theirs = embedding.as_linear(hidden.reshape(-1, hidden.shape[-1])[mx.array(places)])
    pairs = []
    for deep, output in enumerate(outputs):
        usable = np.flatnonzero(within > deep)
        rows, columns = np.divmod(places[usable], inputs.shape[1])
        flat = mx.array(rows * (inputs.shape[1] - 1) + columns - 1)
        ours = embedding.as_linear(output.reshape(-1, output.shape[-1])[flat])
        pairs.append((mx.stop_gradient(theirs[mx.array(usable)]), ours))
    return pairs


def unrolled(head: Any, embeddings: mx.array, hidden: mx.array, depth: int) -> list[mx.array]:
    """Outputs [rows, tokens, dim] of the head at each depth: the first from hidden states, the others from outputs.

    At depth d, counted from 0, a token sees itself and the d tokens before it as they were drafted, and all earlier
    ones with the model's hidden states.
    """
    (layer,) = head.layers
    attention = layer.self_attn
    rows, tokens, _ = hidden.shape
    causal = mx.arange(tokens)[:, None] - mx.arange(tokens)[None]
    keys: list[mx.array] = []
    values: list[mx.array] = []
    outputs: list[mx.array] = []
    for deep in range(depth):
        pair = [head.pre_fc_norm_embedding(embeddings), head.pre_fc_norm_hidden(hidden)]
        joined = head.fc(mx.concatenate(pair, axis=-1))
        normed = layer.input_layernorm(joined)
        product = attention.q_proj(normed).reshape(rows, tokens, attention.num_attention_heads, -1)
        queries, gate = mx.split(product, 2, axis=-1)
        queries = attention.rope(attention.q_norm(queries).transpose(0, 2, 1, 3))
        keys.append(_keys(attention, normed))
        values.append(_heads(attention, attention.v_proj(normed)))
        early = queries @ keys[0].swapaxes(-1, -2)
        scores = [mx.where(causal >= deep, early, -1e9)]
        late = [(_shifted(keys[m], deep - m), _shifted(values[m], deep - m)) for m in range(1, deep + 1)]
        scores += [mx.sum(queries * key, axis=-1, keepdims=True) for key, _ in late]
        weights = mx.softmax(attention.scale * mx.concatenate(scores, axis=-1), axis=-1)
        mixed = weights[..., :tokens] @ values[0]
        for number, (_, value) in enumerate(late):
            mixed = mixed + weights[..., tokens + number, None] * value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
        after = joined + attention.o_proj(mixed * mx.sigmoid(gate.reshape(rows, tokens, -1)))
        outputs.append(head.norm(after + layer.mlp(layer.post_attention_layernorm(after))))
        hidden = mx.pad(outputs[-1][:, :-1], [(0, 0), (1, 0), (0, 0)])
    return outputs


def _keys(attention: Any, normed: mx.array) -> mx.array:
    rows, tokens, _ = normed.shape
    keys = attention.k_proj(normed).reshape(rows, tokens, attention.num_key_value_heads, -1)
    keys = attention.rope(attention.k_norm(keys).transpose(0, 2, 1, 3))
    return mx.repeat(keys, attention.num_attention_heads // attention.num_key_value_heads, axis=1)


def _heads(attention: Any, values: mx.array) -> mx.array:
    rows, tokens, _ = values.shape
    values = values.reshape(rows, tokens, attention.num_key_value_heads, -1).transpose(0, 2, 1, 3)
    return mx.repeat(values, attention.num_attention_heads // attention.num_key_value_heads, axis=1)


def _shifted(array: mx.array, tokens: int) -> mx.array:
    """The array [rows, heads, tokens, ...] with each token's numbers moved `tokens` places behind."""
    return mx.pad(array, [(0, 0), (0, 0), (tokens, 0), (0, 0)])[:, :, : array.shape[2]]


@click.command()
@plan_options(Plan)
def main(**options: Any) -> None:
    """Train a head, and write it in half precision beside this file."""
    head = train(Plan(**options), lambda line: print(line, file=sys.stderr, flush=True))
    named: Any = tree_flatten(head.parameters())
    tensors = {f"mtp.{name}": array.astype(mx.float16) for name, array in named}
    mx.save_safetensors(str(HEAD_FILE), tensors, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
