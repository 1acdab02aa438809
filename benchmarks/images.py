"""Images in the engine, on a CPU by the processor time of this process, so that other programs do not count.

    python -m benchmarks.images silences [--rows 8] [--steps 240] [--side 32] [--model DIRECTORY]
    python -m benchmarks.images turns [--side 32]
    python -m benchmarks.images features DIRECTORY... --mlx-vlm PYTHON
    python -m benchmarks.images users URL=MODEL URL=MODEL[=TEXT] [--users 16] [--turns 3]

`silences`: the longest step of an engine whose rows decode, beside text and beside images. `turns`: the first token
of a second turn about an image, and about as much text. `features`: those of an image by a checkpoint's tower, and
by mlx-vlm in an environment of its own. `users`: tokens a second, by the clock, of servers of pico-eye that users
ask about unlike images, all at once. For the first two a random text model of 4 million parameters reads the
features of a random tower, unless `--model` names a checkpoint. Each request beside the rows is a prompt of 600
tokens of text, or one with an image of `side` x `side` patches. What is compared takes turns.
"""

from __future__ import annotations

import base64
import io
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

# First: the environment of other processes.
from benchmarks.other_process import ROOT, OtherProcess  # isort: skip
from zmqengine.engine.host.blas import load_tuned_blas

# Before MLX is imported, or it binds to the slow BLAS of its wheel.
load_tuned_blas()

import mlx.core as mx

from tools.pico.eye import pictures
from zmqengine.bench.models.small_models import LLAMA, build_model
from zmqengine.checkpoint.vision import recipe_of
from zmqengine.engine.host.backend import on_gpu
from zmqengine.engine.interface import ModelInfo, RowImage, RowRequest
from zmqengine.engine.load.open_model import open_model
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.open import find_device, find_ops, open_mlx_engine
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.engine.vision.eye import Eye
from zmqengine.engine.vision.towers.layered import LayeredTower, Normalisation
from zmqengine.engine.vision.towers.opening import open_tower
from zmqengine.engine.vision.towers.qwen import QwenVision
from zmqengine.vision_card import VisionCard, image_hash

WIDTH, VOCABULARY, TOKEN = 256, 4096, 4000
TEXT = {
    **LLAMA, "hidden_size": WIDTH, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
}  # fmt: skip
TEXT_TOKENS = 600
"""A prompt that fills its chunks: the pace bounds those, and pieces of images, in time."""
HALF = (0.5, 0.5, 0.5)
clock = time.perf_counter if on_gpu() else time.process_time


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps in which something was read or seen, and the tokens that the rows made in a second."""

    steps_s: list[float]
    tokens_s: float

    @property
    def longest_s(self) -> float:
        """The third longest: two steps in hundreds are the system's."""
        return sorted(self.steps_s)[-3]


def build_eye(side: int) -> tuple[SlotRunner, Eye]:
    """A random text model, and an eye whose features are as wide."""
    encoder: Any = QwenVision(
        {
            "model_type": "qwen3_vl",
            "vision_config": {
                "hidden_size": 128, "intermediate_size": 512, "depth": 12, "num_heads": 2, "patch_size": 16,
                "spatial_merge_size": 2, "num_position_embeddings": 2304, "out_hidden_size": WIDTH,
            },
        }
    )  # fmt: skip
    mx.eval(encoder.parameters())
    tower = LayeredTower(encoder, Normalisation(HALF, HALF), mx.float32, 0)
    card = VisionCard(
        kind="qwen3_vl", patch=16, merge=2, resize="area", placeholder=TOKEN, token=TOKEN,
        pixels_max=(16 * side) ** 2,
    )  # fmt: skip
    runner = open_model(build_model(TEXT, 0), *find_ops()).runner
    assert isinstance(runner, SlotRunner)
    return runner, Eye(card, tower, runner.decoder.embed)


def build_engine(side: int, *, prompt_cache_bytes: int) -> tuple[MlxEngine, Eye]:
    """An engine on that model, and its eye."""
    runner, eye = build_eye(side)
    info = ModelInfo(
        "eye", VOCABULARY, 100_200, frozenset(), 0, vision=eye.card, image_patches_max=eye.card.patches_max
    )
    engine = MlxEngine(
        runner, info, EngineOptions(prompt_cache_bytes=prompt_cache_bytes, rows_max=64), device=find_device(),
        eye=eye, images_bytes_max=1 << 26,
    )  # fmt: skip
    return engine, eye


def open_checkpoint(directory: Path) -> tuple[MlxEngine, VisionCard]:
    """The engine of a checkpoint that sees, without a prefix cache; the first turn warms it up."""
    opened = open_mlx_engine(
        str(directory), EngineOptions(prompt_cache_bytes=0, rows_max=64, speculate="off", warm_up_s=0)
    )
    card = opened.engine.info.vision
    if card is None:
        raise click.ClickException(f"{directory} sees no images")
    return opened.engine, card


def request(row: int, side: int, card: VisionCard, *, has_image: bool) -> RowRequest:
    """A prompt of unlike text and, or instead, an image of random pixels."""
    numbers = np.random.default_rng(row)
    features = (side // card.merge) ** 2
    # Ids of words in any vocabulary.
    text = numbers.integers(20, 88, max(TEXT_TOKENS, features + 40)).tolist()
    if not has_image:
        return RowRequest(row, text, 2)
    pixels = numbers.bytes(side * side * card.patch_bytes)
    grids = [(side, side)]
    prompt = [*text[:20], *[card.token] * features, *text[20:40]]
    image = RowImage(image_hash(card.kind, grids, pixels), 20, features, grids, pixels)
    return RowRequest(row, prompt, 2, images=[image])


def measure(
    engine: MlxEngine,
    card: VisionCard,
    first: int,
    rows: int,
    steps: int,
    side: int,
    *,
    has_image: bool,
) -> Measured:
    """Let `rows` decode for `steps` steps, while requests come one after the other."""
    engine.insert([RowRequest(first + row, [7 + row] * 20, 100_000) for row in range(rows)])
    while engine.stats().rows_decoding < rows:
        engine.next()
    for _ in range(20):
        engine.next()
    steps_s: list[float] = []
    made, started_s = 0, clock()
    own = first + rows
    while len(steps_s) < steps:
        own += 1
        engine.insert([request(own, side, card, has_image=has_image)])
        ended = False
        while not ended and len(steps_s) < steps:
            before_s = clock()
            result = engine.next()
            steps_s.append(clock() - before_s)
            ended = any(token.row == own and token.finish for token in result.tokens)
            made += sum(token.row != own for token in result.tokens)
    seconds = clock() - started_s
    engine.remove(range(first, own + 1))
    return Measured(steps_s, made / seconds)


@click.group()
def main() -> None:
    """Print ratios of processor time, or of time on the clock where a GPU computes."""


@main.command()
@click.option("--rows", default=8, show_default=True, help="Rows that decode.")
@click.option("--steps", default=240, show_default=True, help="Steps beside requests of each kind in a turn.")
@click.option("--side", default=32, show_default=True, help="Patches a side of an image.")
@click.option("--turns", default=3, show_default=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="A checkpoint that sees.")
def silences(rows: int, steps: int, side: int, turns: int, model: Path | None) -> None:
    """Print the longest steps beside both kinds, and their ratio."""
    if model is None:
        engine, eye = build_engine(side, prompt_cache_bytes=0)
        card = eye.card
    else:
        engine, card = open_checkpoint(model)
    found: dict[str, list[Measured]] = {"text": [], "images": []}
    for turn in range(turns + 1):
        for place, kind in enumerate(found):
            first = 1000 * (2 * turn + place)
            result = measure(engine, card, first, rows, steps, side, has_image=kind == "images")
            # The first turn warms up, and teaches the pace.
            if turn:
                found[kind].append(result)
    for kind, results in found.items():
        longest = [round(1000 * each.longest_s, 1) for each in results]
        speed = [round(each.tokens_s, 1) for each in results]
        click.echo(f"{kind:7} longest step ms {longest}  tokens/s of {rows} rows {speed}")
    ratio = statistics.median([each.longest_s for each in found["images"]]) / statistics.median(
        [each.longest_s for each in found["text"]]
    )
    click.echo(f"longest step beside images / beside text: {ratio:.2f}; {engine.stats().images}")


@main.command("turns")
@click.option("--side", default=32, show_default=True, help="Patches a side of the image.")
@click.option("--repeats", default=8, show_default=True)
def second_turns(side: int, repeats: int) -> None:
    """Print the seconds to the first token of a second turn, with an image and with as much text instead."""
    engine, eye = build_engine(side, prompt_cache_bytes=1 << 28)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * repeats):
        has_image = bool(number % 2)
        first = request(2 * number, side, eye.card, has_image=has_image)
        # As many tokens as a prompt with an image has.
        first = replace(first, prompt=first.prompt[: (side // 2) ** 2 + 40])
        before = _first_token_s(engine, first)
        seen = engine.stats().images["images_seen"]
        text = np.random.default_rng(number).integers(5, 3000, 40).tolist()
        following = replace(first, row=first.row + 1, prompt=[*first.prompt, *text])
        seconds = _first_token_s(engine, following)
        assert engine.stats().images["images_seen"] == seen, "the second turn computes no image"
        found[has_image].append(seconds)
        click.echo(f"{'image' if has_image else 'text ':5} first turn {before:.3f} s, second {seconds:.3f} s")
    ratio = statistics.median(found[True]) / statistics.median(found[False])
    click.echo(f"first token of a second turn, with an image / without: {ratio:.2f}")


def _first_token_s(engine: MlxEngine, asked: RowRequest) -> float:
    started_s = clock()
    seconds = 0.0
    engine.insert([asked])
    ended = False
    while not ended:
        for token in engine.next().tokens:
            seconds = seconds or clock() - started_s
            ended = ended or token.finish is not None
    return seconds


@main.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--mlx-vlm", "python", required=True, help="Python of an environment with mlx-vlm.")
@click.option("--side", default=32, show_default=True, help="Patches a side of an image of no fixed size.")
@click.option("--repeats", default=6, show_default=True)
def features(directories: Sequence[Path], python: str, side: int, repeats: int) -> None:
    """Print the seconds of an image's features by each checkpoint, here and by mlx-vlm."""
    for directory in directories:
        recipe = recipe_of(directory, (directory / "tokenizer.json").read_bytes())
        tower = open_tower(directory, recipe, on_gpu=find_device().is_gpu)
        card = recipe.card
        tile = card.tile // card.patch if card.tile else side
        grids = [(tile, tile)]
        found: dict[str, list[float]] = {"here": [], "mlx-vlm": []}
        with mlx_vlm(python, directory) as other:
            for seed in range(repeats + 1):
                made = other.seconds({"grids": grids, "seed": seed, "features": card.features(grids)})
                pixels = np.random.default_rng(seed).integers(0, 256, (tile**2, card.patch_bytes), np.uint8)
                started_s = clock()
                job = tower.begin(pixels, grids)
                while job.step():
                    pass
                job.features()
                # The first warms both up.
                if seed:
                    found["here"].append(clock() - started_s)
                    found["mlx-vlm"].append(made)
        here, there = (statistics.median(seconds) for seconds in found.values())
        click.echo(f"{card.kind:12} {here:.3f} s, mlx-vlm {there:.3f} s: {here / there:.2f}")


@main.command()
@click.argument("servers", nargs=-1, required=True)
@click.option("--users", "count", default=16, show_default=True, help="Users who ask at the same time.")
@click.option("--tokens", default=40, show_default=True, help="Tokens of an answer.")
@click.option("--turns", default=3, show_default=True, help="Times that each server is asked.")
def users(servers: Sequence[str], count: int, tokens: int, turns: int) -> None:
    """Print tokens a second of each server, given as URL=MODEL, and their ratio to the first.

    Chat templates differ: TEXT behind a second "=" precedes the questions to a server, so that prompts are as long.
    """
    found: dict[str, list[float]] = {server: [] for server in servers}
    for turn in range(turns + 1):
        for place, server in enumerate(servers):
            url, model, *text = server.split("=", 2)
            first = (turn * len(servers) + place) * count
            bodies = [_question(model, first + user, tokens, *text) for user in range(count)]
            started_s = time.perf_counter()
            with ThreadPoolExecutor(count) as threads:
                made = list(threads.map(partial(_answered, url), bodies))
            # The first turn warms up.
            if turn:
                found[server].append(sum(made) / (time.perf_counter() - started_s))
    base = statistics.median(found[servers[0]])
    for server, speeds in found.items():
        middle = statistics.median(speeds)
        click.echo(
            f"{server:50} {middle:.1f} tokens/s {[round(speed, 1) for speed in speeds]}: x{middle / base:.2f}"
        )


def _question(model: str, number: int, tokens: int, before: str = "") -> bytes:
    """A body of chat completions about picture `number`, with an answer of exactly `tokens` where that can be asked."""
    kinds, colors, places = pictures.SHAPES, list(pictures.COLORS), (number % 3, number // 3 % 3)
    thing = pictures.Thing(kinds[number % len(kinds)], colors[number // len(kinds) % len(colors)], *places)
    image = pictures.picture(pictures.Scene((thing,)))
    # Unlike ones, whatever they show.
    image.putpixel((0, 0), (number % 256, number // 256, 0))
    written = io.BytesIO()
    image.save(written, "PNG")
    url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    body = {"model": model, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    first = [{"role": "system", "content": before}] if before else []
    return msgspec.json.encode({**body, "messages": [*first, {"role": "user", "content": content}]})


def _answered(url: str, body: bytes) -> int:
    """Tokens of the answer."""
    asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return int(msgspec.json.decode(answer.read())["usage"]["completion_tokens"])


def mlx_vlm(python: str, directory: Path) -> OtherProcess:
    """mlx-vlm on a checkpoint."""
    return OtherProcess(
        [python, "-W", "ignore", "-m", "benchmarks.images_of_others", str(directory.resolve())],
        {"PYTHONPATH": str(ROOT)},
    )


if __name__ == "__main__":
    main()
