"""Train the two models with MLX: `python -m zmqengine.bench.edit.train --out DIR [--start SMALLER]`.

The smaller one learns from nothing. The larger one starts as the smaller one, with more layers and wider ones that at
first add nothing, and goes on learning. On one core that takes about five minutes, and two.

The same options give the same documents, tokenizer and batches; weights then differ only by how the machine's BLAS
rounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from zmqengine.bench.edit.documents import edits, exercises, lessons
from zmqengine.pico.batches import batches
from zmqengine.pico.corpus import ChatDocument
from zmqengine.pico.directory import model_config, write_model
from zmqengine.pico.loss import arrays, loss
from zmqengine.pico.markers import END
from zmqengine.pico.optimizer import make_optimizer
from zmqengine.pico.tokens import CHAT_TEMPLATE, train_tokenizer

_CONTEXT_TOKENS = 512
_TOKENIZER_DOCUMENTS = 4000
_HELD_OUT_DOCUMENTS = 200
_REPORT_STEPS = 50
_MEASURE_STEPS = 250


@dataclass(frozen=True)
class Plan:
    """What a training run does; the defaults are those of the smaller model."""

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


def train(plan: Plan, report: Callable[[str], None], start: Path | None = None) -> Outcome:
    """Train a new model, or go on from the smaller one in `start`. `report` is called with a line every 50 steps."""
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json")) if start else _tokenizer(plan)
    (end_token_id,) = tokenizer.encode(END).ids
    config = model_config(tokenizer.get_vocab_size(), plan.width, plan.layers, end_token_id)
    config |= {"intermediate_size": plan.inner_width, "max_position_embeddings": _CONTEXT_TOKENS}
    mx.random.seed(plan.seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    _initialise(model)
    if start:
        _take_over(model, start)
    optimizer = make_optimizer(plan.matrix_rate, plan.other_rate, plan.steps, 0.01)
    loss_and_gradients = nn.value_and_grad(model, loss)  # type: ignore[attr-defined]
    documents = exercises(plan.seed + 3) if start else _from_nothing(plan)
    stream = batches(documents, tokenizer, plan.batch_tokens, _CONTEXT_TOKENS)
    started, tokens, recent = time.monotonic(), 0, 0.0
    for step, batch in enumerate(islice(stream, plan.steps), start=1):
        value, gradients = loss_and_gradients(model, *arrays(batch))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        tokens += batch.inputs.size
        recent = recent + 0.05 * (value.item() - recent) if recent else value.item()
        if step % _REPORT_STEPS == 0:
            spent = time.monotonic() - started
            line = (
                f"step {step}/{plan.steps}  loss {recent:.4f}  {tokens / spent:.0f} tokens/s  {spent:.0f} s"
            )
            if step % _MEASURE_STEPS == 0:
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
    weights: dict[str, Any] = dict(tree_flatten(outcome.model.parameters()))
    record = {
        "command": _command(outcome),
        "plan": asdict(outcome.plan),
        "parameters": sum(weight.size for weight in weights.values()),
        "held_out_exact": outcome.exact,
        "mlx": version("mlx"),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _initialise(model: Any) -> None:
    """Start from layers that change nothing, so that copying what was read is learnt sooner."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    # Logits share the embeddings: MLX's own scale would make the first guesses far too sure.
    model.model.embed_tokens.weight = mx.random.normal(model.model.embed_tokens.weight.shape) * 0.05


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


def _command(outcome: Outcome) -> str:
    """The command that repeats a run: every option that is not the default."""
    options = [
        f" --{field.name.replace('_', '-')} {value}"
        for field in fields(outcome.plan)
        if (value := getattr(outcome.plan, field.name)) != field.default
    ]
    start = "" if outcome.is_new else " --start SMALLER"
    return "python -m zmqengine.bench.edit.train --out DIR" + start + "".join(options)


def _plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """An option for every field of the plan."""
    for field in reversed(fields(Plan)):
        command = click.option(f"--{field.name.replace('_', '-')}", default=field.default, show_default=True)(
            command
        )
    return command


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@click.option(
    "--start",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of a smaller model of the same width, to go on from.",
)
@_plan_options
def main(out: Path, start: Path | None, **options: Any) -> None:
    """Train a model like the bundled ones; their training.json names the options."""
    write(out, train(Plan(**options), lambda line: print(line, file=sys.stderr, flush=True), start))


if __name__ == "__main__":
    main()
