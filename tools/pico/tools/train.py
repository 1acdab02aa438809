"""Make pico-tools of pico with MLX: `python -m tools.pico.tools.train --out DIR [--checkpoints DIR]`.

The same options give the same corpus, the same tokenizer and the same batches; weights then differ only by
how the machine's BLAS rounds.
"""

import json
import sys
import time
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
import mlx.optimizers as optim
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from tools.pico.batches import Batch, batches
from tools.pico.directory import write_model
from tools.pico.loss import mean_loss
from tools.pico.markers import END
from tools.pico.optimizer import make_optimizer, rate_share
from tools.pico.template import CHAT_TEMPLATE
from tools.pico.tools import corpus
from tools.pico.tools.checkpoints import Checkpoints
from tools.pico.tools.new_tokens import new_embeddings
from tools.pico.tools.plan import Plan, Stage, stages
from tools.pico.tools.positions import CONTEXT_TOKENS, ROPE_SCALING, gaps
from tools.pico.tools.tokens import train_tokenizer
from tools.pico.training import Report, learn, plan_options, write_record
from zmqengine.pico import model_path

_REPORT_STEPS = 50
_SAVE_EVERY_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What came of it: the loss in nats per learnt token."""

    plan: Plan
    model: Any
    tokenizer: Tokenizer
    config: dict[str, Any]
    held_out_loss: float


def train(plan: Plan, report: Report, checkpoints: Checkpoints, start: Path | None = None) -> Outcome:
    """Go on from the model in `start`, the bundled pico if None, or from what `checkpoints` hold.

    `report` gets a line every 50 steps.
    """
    texts = (
        document.text for document in islice(corpus.documents("train", plan.seed), plan.tokenizer_documents)
    )
    tokenizer = train_tokenizer(texts, plan.pieces, plan.spaced_words)
    model, config = _begin(start or model_path(), tokenizer)
    share = 1.0
    for stage in stages(plan):
        optimizer = make_optimizer(
            plan.matrix_rate * share, plan.other_rate * share, stage.fall_steps, stage.end
        )
        _run(_Run(model, tokenizer, optimizer, checkpoints, report), stage, plan.seed)
        share *= rate_share(stage.steps, stage.fall_steps, stage.end)
    held_out = list(islice(corpus.documents("held_out", plan.seed), plan.held_out_documents))
    held_out_loss = mean_loss(model, tokenizer, held_out, CONTEXT_TOKENS)
    report(f"held-out loss {held_out_loss:.4f} nats per learnt token")
    return Outcome(plan, model, tokenizer, config, held_out_loss)


def write(out: Path, outcome: Outcome) -> None:
    """Write the model into `out` in mlx-lm's format, with a `training.json` that says how it was made."""
    write_model(out, outcome.model, outcome.config, outcome.tokenizer, CHAT_TEMPLATE)
    results = {"held_out_loss": outcome.held_out_loss}
    write_record(out, "tools.pico.tools.train --out DIR", outcome.plan, outcome.model, results)


@dataclass(frozen=True)
class _Run:
    model: Any
    tokenizer: Tokenizer
    optimizer: optim.Optimizer
    checkpoints: Checkpoints
    report: Report


def _run(run: _Run, stage: Stage, seed: int) -> None:
    """Take the steps of a stage that are not done yet."""
    if finished := run.checkpoints.finished(stage.name):
        run.model.load_weights(list(finished.items()))
        return
    done = run.checkpoints.resume(stage.name, run.model, run.optimizer)
    if done < stage.steps:
        _steps(run, stage, seed, done)
    run.checkpoints.finish(stage.name, run.model)


def _steps(run: _Run, stage: Stage, seed: int, done: int) -> None:
    saved = time.monotonic()
    steps = learn(run.model, run.optimizer, _batches(run, stage, seed, done))
    for number, step in enumerate(steps, start=done + 1):
        if number % _REPORT_STEPS == 0:
            run.report(f"{stage.name}: step {number}/{stage.steps}  {step}")
        if time.monotonic() - saved > _SAVE_EVERY_S:
            run.checkpoints.save(stage.name, run.model, run.optimizer, number)
            saved = time.monotonic()


def _batches(run: _Run, stage: Stage, seed: int, done: int) -> Iterator[Batch]:
    """Those of a stage after the first `done`; while one is out, the model's positions have its gap."""
    stream = islice(batches(stage.documents, run.tokenizer, stage.batch_tokens, CONTEXT_TOKENS), stage.steps)
    with gaps(run.model, CONTEXT_TOKENS, stage.gap_share, seed) as positions:
        for number, batch in enumerate(stream):
            # Also for what is done: the gaps that follow come out of the same stream.
            positions.draw(batch.inputs.shape[1])
            if number >= done:
                yield batch


def _begin(start: Path, tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
    """The model in `start` with another tokenizer and positions for a longer context."""
    (end_token_id,) = tokenizer.encode(END).ids
    config: dict[str, Any] = json.loads((start / "config.json").read_text(encoding="utf-8"))
    config |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_scaling": ROPE_SCALING,
        "eos_token_id": end_token_id,
    }
    loaded: Any = mx.load(str(start / "model.safetensors"))
    weights: dict[str, Any] = dict(loaded)
    name = "model.embed_tokens.weight"
    first_tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    weights[name] = new_embeddings(weights[name], first_tokenizer, tokenizer)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    model.load_weights(list(weights.items()))
    return model, config


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path),
    help="Directory to keep the state of the run in, and to go on from.",
)
@plan_options(Plan)
def main(out: Path, checkpoints: Path | None, **options: Any) -> None:
    """Make a model like the bundled one. `python -m tools.pico.tools.evaluate DIR --card` adds its card."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    write(out, train(Plan(**options), report, Checkpoints(checkpoints)))


if __name__ == "__main__":
    main()
