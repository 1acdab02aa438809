"""Train pico-embed with MLX: `python -m tools.pico.embedding.train --out DIR`.

A BERT of about a million parameters, with the mean of its states as a text's vector. A pair's vectors are drawn
together, and apart from those of the other pairs of a batch (InfoNCE, van den Oord et al., 2018).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tokenizers import Tokenizer

from tools.pico.embedding.directory import model_config, train_tokenizer, write_model
from tools.pico.embedding.pairs import Pair, pairs
from tools.pico.training import Report, plan_options, write_record
from zmqengine.engine.embedding.encoders.bert import Bert
from zmqengine.engine.embedding.packing import Packed
from zmqengine.engine.embedding.pooling import pool
from zmqengine.engine.host.host_heap import keep_freed_arrays
from zmqengine.engine.texts.pooling import unit

_TOKENIZER_PAIRS = 20_000
_REPORT_STEPS = 50
_WARM_UP_STEPS = 100


@dataclass(frozen=True)
class Plan:
    """A training run; the defaults are those of the bundled model. `batch` counts pairs."""

    steps: int = 800
    batch: int = 128
    vocabulary_size: int = 2000
    width: int = 128
    layers: int = 3
    seed: int = 1
    rate: float = 0.0015
    temperature: float = 0.05


def batches(plan: Plan) -> Iterator[list[Pair]]:
    """Batches in which no two pairs have the same key."""
    stream = pairs("train", plan.seed + 1)
    while True:
        batch: dict[str, Pair] = {}
        while len(batch) < plan.batch:
            pair = next(stream)
            batch.setdefault(pair.key, pair)
        yield list(batch.values())


def vectors_of(model: Bert, packed: Packed) -> mx.array:
    """Vectors of length 1, as the engine computes them."""
    states = model.start(packed)
    for layer in model.layers:
        states = layer(states, packed)
    return unit(pool(model.finish(states), packed, "mean"))


def loss(model: Bert, left: Packed, right: Packed, temperature: float) -> mx.array:
    """How surely each text of one side names its own on the other, both ways."""
    scores = vectors_of(model, left) @ vectors_of(model, right).T / temperature
    own = mx.arange(scores.shape[0])
    there = nn.losses.cross_entropy(scores, own, reduction="mean")
    back = nn.losses.cross_entropy(scores.T, own, reduction="mean")
    return (there + back) / 2


def train(plan: Plan, report: Report) -> tuple[Bert, Tokenizer, dict[str, Any], float]:
    """A trained model, its tokenizer and config, and the mean of its last losses."""
    stream = pairs("train", plan.seed)
    texts = [text for pair in islice(stream, _TOKENIZER_PAIRS) for text in pair[:2]]
    tokenizer = train_tokenizer(texts, plan.vocabulary_size)
    config = model_config(tokenizer.get_vocab_size(), plan.width, plan.layers)
    mx.random.seed(plan.seed)
    model = Bert(config)
    for table in (model.word, model.position, model.token_type):
        table.weight = mx.random.normal(table.weight.shape) * 0.1
    rise = optim.linear_schedule(0.0, plan.rate, _WARM_UP_STEPS)
    fall = optim.cosine_decay(plan.rate, max(1, plan.steps - _WARM_UP_STEPS))
    optimizer = optim.AdamW(optim.join_schedules([rise, fall], [_WARM_UP_STEPS]), weight_decay=0.01)
    gradients_of = nn.value_and_grad(model, loss)  # type: ignore[attr-defined]
    recent = float("nan")
    for number, batch in enumerate(islice(batches(plan), plan.steps), start=1):
        left, right = (
            Packed([encoding.ids for encoding in tokenizer.encode_batch([pair[side] for pair in batch])])
            for side in (0, 1)
        )
        value, gradients = gradients_of(model, left, right, plan.temperature)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(value, model.state, optimizer.state)
        recent = value.item() if number == 1 else recent + 0.05 * (value.item() - recent)
        if number % _REPORT_STEPS == 0:
            report(f"step {number}/{plan.steps}  loss {recent:.4f}")
    return model, tokenizer, config, recent


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@plan_options(Plan)
def main(out: Path, **options: Any) -> None:
    """Train a model like the bundled one."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    keep_freed_arrays()
    plan = Plan(**options)
    model, tokenizer, config, recent = train(plan, report)
    write_model(out, model, config, tokenizer)
    write_record(out, "tools.pico.embedding.train --out DIR", plan, model, {"loss": recent})
    print(json.dumps({"loss": recent}))


if __name__ == "__main__":
    main()
