"""Train pico with MLX: `python -m tools.pico.train --out DIR`.

The same options give the same corpus, the same tokenizer and the same batches; weights then differ only by
how the machine's BLAS rounds.
"""

import sys
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from tools.pico import corpus
from tools.pico.batches import batches
from tools.pico.directory import CONTEXT_TOKENS, model_config, write_model
from tools.pico.loss import mean_loss
from tools.pico.markers import END
from tools.pico.optimizer import make_optimizer
from tools.pico.tokens import CHAT_TEMPLATE, train_tokenizer
from tools.pico.training import Report, initialise, learn, plan_options, write_record

_TOKENIZER_DOCUMENTS = 8000
_HELD_OUT_DOCUMENTS = 300
_REPORT_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """Options of a training run; the defaults are those of the bundled model.

    Tokens are those of a step, padding included; it begins with the copying documents; rates are the peaks of Muon and
    of Adam.
    """

    steps: int = 4500
    batch_tokens: int = 1536
    copying_documents: int = 12000
    vocabulary_size: int = 1280
    width: int = 128
    layers: int = 4
    seed: int = 1
    matrix_rate: float = 0.015
    other_rate: float = 0.006


@dataclass(frozen=True)
class Outcome:
    """What came of it: losses in nats per learnt token."""

    plan: Plan
    model: Any
    tokenizer: Tokenizer
    config: dict[str, Any]
    first_loss: float
    held_out_loss: float


def train(plan: Plan, report: Report) -> Outcome:
    """Train a new model. `report` is called with a line every 50 steps."""
    tokenizer = train_tokenizer(
        (document.text for document in corpus.sample("train", plan.seed, _TOKENIZER_DOCUMENTS)),
        plan.vocabulary_size,
    )
    (end_token_id,) = tokenizer.encode(END).ids
    config = model_config(tokenizer.get_vocab_size(), plan.width, plan.layers, end_token_id)
    mx.random.seed(plan.seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    initialise(model)
    optimizer = make_optimizer(plan.matrix_rate, plan.other_rate, plan.steps, 0.01)

    lessons = corpus.copying_lessons(plan.seed + 2, plan.copying_documents)
    documents = chain(lessons, corpus.documents("train", plan.seed + 1))
    stream = batches(documents, tokenizer, plan.batch_tokens, CONTEXT_TOKENS)
    first_loss = float("nan")
    for number, step in enumerate(learn(model, optimizer, islice(stream, plan.steps)), start=1):
        if number == 1:
            first_loss = step.loss
        if number % _REPORT_STEPS == 0:
            report(f"step {number}/{plan.steps}  {step}")
    held_out = corpus.sample("held_out", plan.seed, _HELD_OUT_DOCUMENTS)
    held_out_loss = mean_loss(model, tokenizer, held_out, CONTEXT_TOKENS)
    report(f"held-out loss {held_out_loss:.4f} nats per learnt token")
    return Outcome(plan, model, tokenizer, config, first_loss, held_out_loss)


def write(out: Path, outcome: Outcome) -> None:
    """Write the model into `out` in mlx-lm's format, with a `training.json` that says how it was made."""
    write_model(out, outcome.model, outcome.config, outcome.tokenizer, CHAT_TEMPLATE)
    results = {"first_loss": outcome.first_loss, "held_out_loss": outcome.held_out_loss}
    write_record(out, "tools.pico.train --out DIR", outcome.plan, outcome.model, results)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@plan_options(Plan)
def main(out: Path, **options: Any) -> None:
    """Train a model like the bundled one. `python -m tools.pico.evaluate DIR --card` adds its card."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    write(out, train(Plan(**options), report))


if __name__ == "__main__":
    main()
