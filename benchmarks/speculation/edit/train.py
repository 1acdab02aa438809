"""Train the two models with MLX: `python -m benchmarks.speculation.edit.train --out DIR [--start SMALLER]`.

The smaller one learns from nothing. The larger one starts as the smaller one, with more layers and wider ones that at
first add nothing, and goes on learning. On one core that takes about five minutes, and two.

The same options give the same documents, tokenizer and batches; weights then differ only by how the machine's BLAS
rounds.
"""

from __future__ import annotations

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
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from benchmarks.speculation.edit.documents import edits, exercises, lessons
from tools.pico.batches import batches
from tools.pico.corpus import ChatDocument
from tools.pico.directory import model_config, write_model
from tools.pico.markers import END
from tools.pico.optimizer import make_optimizer
from tools.pico.tokens import CHAT_TEMPLATE, train_tokenizer
from tools.pico.training import Report, initialise, learn, plan_options, write_record

_CONTEXT_TOKENS = 512
_TOKENIZER_DOCUMENTS = 4000
_HELD_OUT_DOCUMENTS = 200
_REPORT_STEPS = 50
_MEASURE_STEPS = 250


@dataclass(frozen=True)
class Plan:
    """Options of a training run; the defaults are those of the smaller model."""

    steps: int = 3000
    batch_tokens: int = 1536
    lessons: int = 14000
    vocabulary_size: int = 640
    width: int = 64
    layers: int = 3
    inner_width: int = 64
    seed: int = 1
    matrix_rate: float = 0.015
    other_rate: float = 0.006


@dataclass(frozen=True)
class Outcome:
    """What came of it. `exact` is the share of held-out documents of which every token was right."""

    plan: Plan
    is_new: bool
    model: Any
    tokenizer: Tokenizer
    config: dict[str, Any]
    exact: float


def train(plan: Plan, report: Report, start: Path | None = None) -> Outcome:
    """Train a new model, or go on from the smaller one in `start`. `report` is called with a line every 50 steps."""
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json")) if start else _tokenizer(plan)
    (end_token_id,) = tokenizer.encode(END).ids
    config = model_config(tokenizer.get_vocab_size(), plan.width, plan.layers, end_token_id)
    config |= {"intermediate_size": plan.inner_width, "max_position_embeddings": _CONTEXT_TOKENS}
    mx.random.seed(plan.seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    initialise(model)
    if start:
        _take_over(model, start)
    optimizer = make_optimizer(plan.matrix_rate, plan.other_rate, plan.steps, 0.01)
    documents = exercises(plan.seed + 3) if start else _from_nothing(plan)
    stream = batches(documents, tokenizer, plan.batch_tokens, _CONTEXT_TOKENS)
    for number, step in enumerate(learn(model, optimizer, islice(stream, plan.steps)), start=1):
        if number % _REPORT_STEPS == 0:
            line = f"step {number}/{plan.steps}  {step}  {step.seconds:.0f} s"
            if number % _MEASURE_STEPS == 0:
                exact, right = held_out(model, tokenizer, 60)
                line += f"  held-out: {exact:.1%} of documents, {right:.2%} of tokens"
            report(line)
    exact, right = held_out(model, tokenizer, _HELD_OUT_DOCUMENTS)
    report(f"held-out: {exact:.1%} of documents said without an error, {right:.2%} of tokens right")
    return Outcome(plan, start is None, model, tokenizer, config, exact)


def held_out(model: Any, tokenizer: Tokenizer, documents: int) -> tuple[float, float]:
    """The share of held-out documents said without an error, greedily, and that of their tokens that are right.

    A token is right if it is the likeliest after the right ones.
    """
    exact = right = count = 0
    for edit in islice(edits("held_out", 0), documents):
        (batch,) = batches([edit.chat], tokenizer, _CONTEXT_TOKENS, _CONTEXT_TOKENS)
        said = np.array(mx.argmax(model(mx.array(batch.inputs)), axis=-1)).reshape(-1)[batch.places]
        alike = said == batch.targets
        exact += bool(alike.all())
        right += int(alike.sum())
        count += len(alike)
    return exact / documents, right / count


def write(out: Path, outcome: Outcome) -> None:
    """Write the model into `out` in mlx-lm's format, in half precision, with a `training.json`: how it was made."""
    outcome.model.set_dtype(mx.float16)
    config = outcome.config | {"torch_dtype": "float16"}
    write_model(out, outcome.model, config, outcome.tokenizer, CHAT_TEMPLATE)
    start = "" if outcome.is_new else " --start SMALLER"
    program = f"benchmarks.speculation.edit.train --out DIR{start}"
    write_record(out, program, outcome.plan, outcome.model, {"held_out_exact": outcome.exact})


def _take_over(model: Any, start: Path) -> None:
    """Make `model` compute what the smaller one in `start` does: what it has more than that adds nothing yet."""
    loaded: Any = mx.load(str(start / "model.safetensors"))
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    for name, smaller in loaded.items():
        rows, columns = smaller.shape[0], smaller.shape[-1]
        if smaller.ndim == 1:
            weights[name] = smaller.astype(mx.float32)
        else:
            weights[name][:rows, :columns] = smaller.astype(mx.float32)
    model.load_weights(list(weights.items()))


def _from_nothing(plan: Plan) -> Iterator[ChatDocument]:
    yield from lessons(plan.seed + 2, plan.lessons)
    yield from (edit.chat for edit in edits("train", plan.seed + 1))


def _tokenizer(plan: Plan) -> Tokenizer:
    texts = (edit.chat.text for edit in islice(edits("train", plan.seed), _TOKENIZER_DOCUMENTS))
    return train_tokenizer(texts, plan.vocabulary_size)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@click.option(
    "--start",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of a smaller model of the same width, to go on from.",
)
@plan_options(Plan)
def main(out: Path, start: Path | None, **options: Any) -> None:
    """Train a model like the bundled ones; their training.json names the options."""
    write(out, train(Plan(**options), lambda line: print(line, file=sys.stderr, flush=True), start))


if __name__ == "__main__":
    main()
