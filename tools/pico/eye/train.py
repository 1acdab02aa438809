"""Make pico-eye of pico with MLX: `python -m tools.pico.eye.train --out DIR`.

First the tower learns to name, by pico's own embeddings, the thing in each place. Then tower and text model learn to
answer questions. Both take some fifteen minutes of one core.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from PIL import Image

from tools.pico.draw import Draw
from tools.pico.eye.model import BEGIN, CLOSE, FEATURE, FEATURES, PATCH, PicoEye
from tools.pico.eye.pictures import COLORS, DIGITS, ROWS, SHAPES, SIDE, Scene, picture, scenes_of
from tools.pico.eye.questions import Question, questions_of
from tools.pico.markers import ASSISTANT, END, USER
from tools.pico.training import Report, plan_options, write_record
from zmqengine.engine.host.host_heap import keep_freed_arrays

_REPORT_STEPS = 10
_WARM_UP_STEPS = 10
KINDS = ("nothing", *SHAPES, *DIGITS)


@dataclass(frozen=True)
class Plan:
    """A training run; the defaults are those of the bundled model."""

    look_steps: int = 120
    look_pictures: int = 64
    look_rate: float = 0.004
    talk_steps: int = 1500
    talk_pictures: int = 8
    talk_questions: int = 4
    talk_matrix_rate: float = 0.01
    talk_rate: float = 0.002
    width: int = 64
    layers: int = 2
    seed: int = 1


def patches_of(scenes: list[Scene]) -> np.ndarray:
    """Pixels of pictures as front-ends send them, [pictures, patches, numbers]."""
    made = []
    for scene in scenes:
        small = picture(scene, 2 * SIDE).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        cut = (
            np.asarray(small).reshape(SIDE // PATCH, PATCH, SIDE // PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4)
        )
        made.append(cut.reshape(-1, 3 * PATCH**2))
    return np.stack(made)


def labels_of(scenes: list[Scene]) -> tuple[np.ndarray, np.ndarray]:
    """Kinds and colors of each place, [pictures, places]; the color of no thing is -1."""
    kinds = np.zeros((len(scenes), ROWS**2), np.int32)
    colors = np.full((len(scenes), ROWS**2), -1, np.int32)
    for number, scene in enumerate(scenes):
        for thing in scene.things:
            place = thing.row * ROWS + thing.column
            kinds[number, place] = KINDS.index(thing.kind)
            colors[number, place] = list(COLORS).index(thing.color)
    return kinds, colors


def look(model: PicoEye, plan: Plan, draw: Draw, report: Report) -> None:
    """Teach the tower what stands where: its features shall be near the embeddings of the words for it."""
    table = model.language.model.embed_tokens.weight

    def words(names: tuple[str, ...]) -> mx.array:
        rows = [table[mx.array(model.tokenizer.encode(f" {name}").ids)].mean(axis=0) for name in names]
        made = mx.stack(rows)
        centred: mx.array = (made - made.mean(axis=0)) / table.std()
        return centred

    kind_words, color_words = words(KINDS), words(tuple(COLORS))
    mx.eval(kind_words, color_words)

    def loss(tower: Any, patches: mx.array, kinds: mx.array, colors: mx.array) -> mx.array:
        features = model.features(patches)
        size = features.shape[-1] ** 0.5
        of_kind = nn.losses.cross_entropy(features @ kind_words.T / size, kinds, reduction="mean")
        of_color = nn.losses.cross_entropy(features @ color_words.T / size, mx.maximum(colors, 0))
        is_thing = (colors >= 0).astype(mx.float32)
        return of_kind + (of_color * is_thing).sum() / is_thing.sum()

    optimizer = optim.AdamW(_rates(plan.look_rate, plan.look_steps), weight_decay=0.0)
    gradients_of = nn.value_and_grad(model.tower, loss)  # type: ignore[attr-defined]
    for number in range(1, plan.look_steps + 1):
        scenes = [scenes_of(draw) for _ in range(plan.look_pictures)]
        kinds, colors = labels_of(scenes)
        value, gradients = gradients_of(
            model.tower, mx.array(patches_of(scenes)), mx.array(kinds), mx.array(colors)
        )
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model.tower, gradients)
        mx.eval(value, model.tower.parameters(), optimizer.state)  # type: ignore[no-untyped-call]
        if number % _REPORT_STEPS == 0:
            report(f"look: step {number}/{plan.look_steps}  loss {value.item():.4f}")


def encoded(model: PicoEye, question: Question) -> tuple[list[int], int]:
    """Ids of a question about a picture and its answer, and how many of them the answer has."""
    asked = f"{USER}{BEGIN}{FEATURE * FEATURES}{CLOSE}{question.text}{END}{ASSISTANT}"
    answer = model.tokenizer.encode(f"{question.answer}{END}").ids
    return [*model.tokenizer.encode(asked).ids, *answer], len(answer)


def talk(model: PicoEye, plan: Plan, draw: Draw, report: Report, save: Any) -> float:
    """Teach both to answer; returns a running mean of the loss."""

    def loss(
        whole: Any, patches: mx.array, owners: mx.array, tokens: mx.array, targets: mx.array
    ) -> mx.array:
        features = model.features(patches)[owners]
        states = model.hidden(tokens, features, 2)
        weights = (targets >= 0).astype(mx.float32)
        places = mx.array(np.flatnonzero(np.array(targets) >= 0))
        learnt = states.reshape(-1, states.shape[-1])[places]
        logits = model.language.model.embed_tokens.as_linear(learnt)
        losses = nn.losses.cross_entropy(logits, targets.reshape(-1)[places])
        return losses.sum() / weights.sum()

    muon = optim.Muon(_rates(plan.talk_matrix_rate, plan.talk_steps), weight_decay=0.0)
    adam = optim.AdamW(_rates(plan.talk_rate, plan.talk_steps), betas=[0.9, 0.98], weight_decay=0.0)
    optimizer = optim.MultiOptimizer([muon, adam], [_is_text_matrix])
    gradients_of = nn.value_and_grad(model, loss)  # type: ignore[attr-defined]
    recent = float("nan")
    for number in range(1, plan.talk_steps + 1):
        scenes = [scenes_of(draw) for _ in range(plan.talk_pictures)]
        asked = [
            (at, each)
            for at, scene in enumerate(scenes)
            for each in questions_of(scene, draw, plan.talk_questions)
        ]
        rows = [encoded(model, question) for _, question in asked]
        longest = max(len(ids) for ids, _ in rows) - 1
        tokens = np.zeros((len(rows), longest), np.int32)
        targets = np.full((len(rows), longest), -1, np.int32)
        for row, (ids, learnt) in enumerate(rows):
            tokens[row, : len(ids) - 1] = ids[:-1]
            targets[row, len(ids) - 1 - learnt : len(ids) - 1] = ids[-learnt:]
        owners = mx.array([at for at, _ in asked])
        value, gradients = gradients_of(
            model, mx.array(patches_of(scenes)), owners, mx.array(tokens), mx.array(targets)
        )
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)  # type: ignore[no-untyped-call]
        recent = value.item() if number == 1 else recent + 0.1 * (value.item() - recent)
        if number % _REPORT_STEPS == 0:
            report(f"talk: step {number}/{plan.talk_steps}  loss {recent:.4f}")
            save()
    return recent


def _is_text_matrix(path: str, weight: mx.array) -> bool:
    """Whether Muon changes it: matrices in the text model's layers."""
    return weight.ndim == 2 and "language" in path and "embed_tokens" not in path


def _rates(peak: float, steps: int) -> Any:
    rise = optim.linear_schedule(0.0, peak, _WARM_UP_STEPS)
    fall = optim.cosine_decay(peak, max(1, steps - _WARM_UP_STEPS))
    return optim.join_schedules([rise, fall], [_WARM_UP_STEPS])


def train(plan: Plan, report: Report, out: Path) -> None:
    """Train a model and write it into `out`, now and then while it learns too."""
    mx.random.seed(plan.seed)
    model = PicoEye(plan.width, plan.layers)
    for layer in model.tower.layers:
        layer.out.weight *= 0
        layer.down.weight *= 0
    model.tower.position = mx.random.normal(model.tower.position.shape) * 0.02
    draw = Draw(plan.seed, "train")
    look(model, plan, draw, report)
    recent = talk(model, plan, draw, report, lambda: model.write(out))
    model.write(out)
    write_record(out, "tools.pico.eye.train --out DIR", plan, model, {"loss": recent})


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory to write the model to."
)
@plan_options(Plan)
def main(out: Path, **options: Any) -> None:
    """Train a model like the bundled one. `python -m tools.pico.eye.evaluate DIR --card` adds its card."""

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    keep_freed_arrays()
    out.mkdir(parents=True, exist_ok=True)
    train(Plan(**options), report, out)
    print(json.dumps({"out": str(out)}))


if __name__ == "__main__":
    main()
