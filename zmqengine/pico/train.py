"""Train pico with MLX: `python -m zmqengine.pico.train --out DIR`.

The same options give the same corpus, the same tokenizer and the same batches; weights then differ only by
how the machine's BLAS rounds.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from zmqengine.pico import corpus
from zmqengine.pico.batches import batches
from zmqengine.pico.directory import CONTEXT_TOKENS, model_config, write_model
from zmqengine.pico.loss import arrays, loss, mean_loss
from zmqengine.pico.markers import END
from zmqengine.pico.optimizer import make_optimizer
from zmqengine.pico.tokens import CHAT_TEMPLATE, train_tokenizer

_TOKENIZER_DOCUMENTS = 8000
_HELD_OUT_DOCUMENTS = 300
_REPORT_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """What a training run does; the defaults are those of the bundled model."""

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


def train(plan: Plan, report: Callable[[str], None]) -> Outcome:
    """Train a new model. `report` is called with a line every 50 steps."""
    tokenizer = train_tokenizer(
        (document.text for document in corpus.sample("train", plan.seed, _TOKENIZER_DOCUMENTS)),
        plan.vocabulary_size,
    )
    (end_token_id,) = tokenizer.encode(END).ids
    config = model_config(tokenizer.get_vocab_size(), plan.width, plan.layers, end_token_id)
    mx.random.seed(plan.seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    _initialise(model)
    optimizer = make_optimizer(plan.matrix_rate, plan.other_rate, plan.steps, 0.01)
    loss_and_gradients = nn.value_and_grad(model, loss)  # type: ignore[attr-defined]

    lessons = corpus.copying_lessons(plan.seed + 2, plan.copying_documents)
    documents = chain(lessons, corpus.documents("train", plan.seed + 1))
    stream = batches(documents, tokenizer, plan.batch_tokens, CONTEXT_TOKENS)
    started, tokens, first_loss, recent = time.monotonic(), 0, float("nan"), 0.0
    for step, batch in enumerate(islice(stream, plan.steps), start=1):
        value, gradients = loss_and_gradients(model, *arrays(batch))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        tokens += batch.inputs.size
        if step == 1:
            first_loss = recent = value.item()
        recent += 0.05 * (value.item() - recent)
        if step % _REPORT_STEPS == 0:
            rate = tokens / (time.monotonic() - started)
            report(f"step {step}/{plan.steps}  loss {recent:.3f}  {rate:.0f} tokens/s")
    held_out = corpus.sample("held_out", plan.seed, _HELD_OUT_DOCUMENTS)
    held_out_loss = mean_loss(model, tokenizer, held_out, CONTEXT_TOKENS)
    report(f"held-out loss {held_out_loss:.4f} nats per learnt token")
    return Outcome(plan, model, tokenizer, config, first_loss, held_out_loss)


def _initialise(model: Any) -> None:
    """Start from layers that change nothing, so that copying what was read is learnt sooner."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    # Logits share the embeddings: MLX's own scale would make the first guesses far too sure.
    model.model.embed_tokens.weight = mx.random.normal(model.model.embed_tokens.weight.shape) * 0.05


def write(out: Path, outcome: Outcome) -> None:
    """Write the model into `out` in mlx-lm's format, with a `training.json` that says how it was made."""
    write_model(out, outcome.model, outcome.config, outcome.tokenizer, CHAT_TEMPLATE)
    weights: dict[str, Any] = dict(tree_flatten(outcome.model.parameters()))
    record = {
        "command": _command(outcome.plan),
        "plan": asdict(outcome.plan),
        "parameters": sum(weight.size for weight in weights.values()),
        "first_loss": outcome.first_loss,
        "held_out_loss": outcome.held_out_loss,
        "mlx": version("mlx"),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _command(plan: Plan) -> str:
    """The command that repeats a run: every option that is not the default."""
    names = {"vocabulary_size": "vocabulary"}
    options = [
        f" --{names.get(field.name, field.name).replace('_', '-')} {value}"
        for field in fields(plan)
        if (value := getattr(plan, field.name)) != field.default
    ]
    return "python -m zmqengine.pico.train --out DIR" + "".join(options)


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@click.option("--steps", default=Plan.steps, show_default=True, help="Optimizer steps.")
@click.option(
    "--batch-tokens", default=Plan.batch_tokens, show_default=True, help="Tokens a step, padding included."
)
@click.option("--copying-documents", default=Plan.copying_documents, show_default=True, help="To start with.")
@click.option("--vocabulary", default=Plan.vocabulary_size, show_default=True, help="Tokens known at most.")
@click.option("--width", default=Plan.width, show_default=True, help="Hidden size, a multiple of 32.")
@click.option("--layers", default=Plan.layers, show_default=True)
@click.option("--seed", default=Plan.seed, show_default=True)
@click.option(
    "--matrix-rate", default=Plan.matrix_rate, show_default=True, help="Peak learning rate of Muon."
)
@click.option("--other-rate", default=Plan.other_rate, show_default=True, help="Peak learning rate of Adam.")
def main(
    out: Path,
    steps: int,
    batch_tokens: int,
    copying_documents: int,
    vocabulary: int,
    width: int,
    layers: int,
    seed: int,
    matrix_rate: float,
    other_rate: float,
) -> None:
    """Train a model like the bundled one. `python -m zmqengine.pico.evaluate DIR --card` adds its card."""
    plan = Plan(
        steps, batch_tokens, copying_documents, vocabulary, width, layers, seed, matrix_rate, other_rate
    )
    outcome = train(plan, report=lambda line: print(line, file=sys.stderr, flush=True))
    write(out, outcome)


if __name__ == "__main__":
    main()
