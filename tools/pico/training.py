"""What all training programs do alike: how weights begin, the steps, the options of a plan, and the record of a run."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from tools.pico.batches import Batch
from tools.pico.loss import arrays, loss

_RECENT_SHARE = 0.05

Report = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A step that was taken: the loss of its batch, in nats per learnt token, and what has come of all so far.

    `recent` is a running mean of the loss; `tokens` are all tokens read, padding included, in `seconds`.
    """

    loss: float
    recent: float
    tokens: int
    seconds: float

    def __str__(self) -> str:
        return f"loss {self.recent:.4f}  {self.tokens / self.seconds:.0f} tokens/s"


def initialise(model: Any) -> None:
    """Start from layers that change nothing, so that copying what was read is learnt sooner."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    # Logits share the embeddings: MLX's own scale would make the first guesses far too sure.
    model.model.embed_tokens.weight = mx.random.normal(model.model.embed_tokens.weight.shape) * 0.05


def learn(model: Any, optimizer: optim.Optimizer, batches: Iterable[Batch]) -> Iterator[Step]:
    """Change `model` by one step a batch, and tell of each."""
    loss_and_gradients = nn.value_and_grad(model, loss)  # type: ignore[attr-defined]
    started, tokens, recent = time.monotonic(), 0, None
    for batch in batches:
        value, gradients = loss_and_gradients(model, *arrays(batch))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        now: float = value.item()
        recent = now if recent is None else recent + _RECENT_SHARE * (now - recent)
        tokens += batch.inputs.size
        yield Step(now, recent, tokens, time.monotonic() - started)


def plan_options(plan: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option of the command line for every field of a dataclass, with its default."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(fields(plan)):
            command = click.option(_option(field), default=field.default, show_default=True)(command)
        return command

    return decorate


def command_of(program: str, plan: Any) -> str:
    """The command that repeats a run of `program`: every option of its plan that is not the default."""
    options = [
        f" {_option(field)} {value}"
        for field in fields(plan)
        if (value := getattr(plan, field.name)) != field.default
    ]
    return f"python -m {program}{''.join(options)}"


def write_record(out: Path, program: str, plan: Any, model: Any, results: dict[str, float]) -> None:
    """Write `training.json` into the model's directory `out`: the command that repeats the run, and its `results`."""
    weights: dict[str, Any] = dict(tree_flatten(model.parameters()))
    record = {
        "command": command_of(program, plan),
        "plan": asdict(plan),
        "parameters": sum(weight.size for weight in weights.values()),
        **results,
        "mlx": version("mlx"),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _option(field: Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"
