"""`python -m benchmarks.kv_bits [SHAPE...]`: keys and values with all bits, and in 8.

For each shape of a random model: bytes of a row, processor time of a decode step and of a piece of a prompt behind so
many columns, and how far the next tokens' distributions are apart. For bundled models also perplexity, over stories
that they were not trained on.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Processor time counts threads that wait for others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
import numpy as np

LENGTHS = (2_000, 16_000, 32_000)
PIECE = 256
DISTANCE_TOKENS = 1_024
REPEATS = 7
STORIES = 64


@click.command()
@click.argument("shapes", nargs=-1)
@click.option(
    "--models", type=click.Path(path_type=Path), default=Path("/tmp"), help="Where models are made."
)
@click.option("--rows", default="1,4", show_default=True, help="Rows of a decode step.")
@click.option("--kernels", type=click.Choice(["auto", "mlx"]), default="auto", show_default=True)
@click.option("--perplexity/--no-perplexity", default=True)
def main(shapes: tuple[str, ...], models: Path, rows: str, kernels: str, perplexity: bool) -> None:
    """Print a table for each."""
    from zmqengine.bench.models.random_model import model_directory_of

    for shape in shapes or ("25m",):
        decoder = _decoder(model_directory_of(shape, models), kernels)
        print(f"\n{shape}, {type(decoder.ops).__name__}\n")
        print("| tokens | rows | MB a row | decode, ms | piece of 256, ms |\n|---|---|---|---|---|")
        for tokens in LENGTHS:
            for count in map(int, rows.split(",")):
                _print_costs(decoder, tokens, count)
        prompt = np.random.default_rng(0).integers(0, 8_000, DISTANCE_TOKENS).tolist()
        wide, packed = (_log_shares(runner, prompt) for runner in _runners(decoder, DISTANCE_TOKENS))
        _print_distance(shape, [wide], [packed])
    if perplexity:
        for name in ("pico", "pico-tools"):
            _print_perplexity(name, kernels)


def _decoder(directory: Path, kernels: Any) -> Any:
    # MLX is imported with it, and the engine sets its environment first.
    from zmqengine.engine.load.loader import load
    from zmqengine.engine.load.open_model import open_model
    from zmqengine.engine.open import find_ops

    runner: Any = open_model(load(str(directory)).model, *find_ops(kernels)).runner
    return runner.decoder


def _runners(decoder: Any, tokens: int) -> Iterator[Any]:
    """With all bits, and in 8."""
    from zmqengine.engine.models.slot_runner import SlotRunner

    for packs in (False, True):
        yield SlotRunner(decoder, tokens, packs=packs)


def _print_costs(decoder: Any, tokens: int, count: int) -> None:
    import mlx.core as mx

    from zmqengine.engine.load.probe import rows_of
    from zmqengine.engine.models.model_runner import RowPiece

    figures = []
    for runner in _runners(decoder, 1 << 17):
        rows = rows_of([[1] * tokens] * count)
        for row in rows:
            row.cache = runner.open(tokens)
            _fill(runner, row.cache, tokens)

        def step(start: int, size: int, rows: Any = rows, runner: Any = runner) -> None:
            pieces = [RowPiece(row, start, size, samples=1) for row in rows]
            outputs = runner.forward(pieces, mx.array([1] * size * len(rows), mx.uint32), 1)
            mx.eval(outputs.logits)

        decode = _least_ms(lambda: step(tokens - 1, 1), REPEATS)
        piece = _least_ms(lambda: step(tokens - PIECE, PIECE), 2) if count == 1 else float("nan")
        figures.append((rows[0].cache.bytes / (1 << 20), decode, piece))
        for row in rows:
            row.cache.close(is_finite=True)
    columns = [" and ".join(f"{figure:,.1f}" for figure in pair) for pair in zip(*figures, strict=True)]
    print(f"| {tokens:,} | {count} | {' | '.join(columns)} |".replace("nan and nan", ""), flush=True)


def _fill(runner: Any, slot: Any, tokens: int) -> None:
    """Write some columns again and again, since no time depends on them."""
    import mlx.core as mx

    from zmqengine.engine.kv.eight_bits import packed

    for group in runner.blocks.groups:
        if group.dtype == mx.uint32:
            continue
        few = mx.random.normal((len(group.arrays), 1, group.heads, PIECE, group.dim))
        for start in range(0, tokens, PIECE):
            runner.slots.restore(slot, group.arrays, few[..., : tokens - start, :], start)
    for layer, shape in enumerate(runner.slots.shapes):
        if shape.group_size:
            parts = packed(mx.random.normal((1, 1, shape.heads, PIECE, shape.dim)), shape.group_size)
            for name, (end, _) in itertools.product(("keys", "values"), shape.parts):
                part = getattr(parts, end.strip())
                for start in range(0, tokens, PIECE):
                    runner.slots.restore(slot, [(layer, name + end)], part[..., : tokens - start, :], start)


def _least_ms(call: Callable[[], None], repeats: int) -> float:
    call()
    least = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        call()
        least = min(least, time.process_time() - began)
    return 1e3 * least


def _log_shares(runner: Any, prompt: list[int]) -> np.ndarray:
    """Log-probabilities [tokens, vocab] of the token after each."""
    import mlx.core as mx

    from zmqengine.engine.load.probe import rows_of
    from zmqengine.engine.models.model_runner import RowPiece

    (row,) = rows_of([prompt])
    row.cache = runner.open(len(prompt))
    parts = []
    for start in range(0, len(prompt), PIECE):
        size = min(PIECE, len(prompt) - start)
        tokens = mx.array(prompt[start : start + size], mx.uint32)
        (logits,) = runner.forward([RowPiece(row, start, size, scored=(0, size))], tokens, 1).scored
        parts.append(np.array(logits.astype(mx.float32)))
    row.cache.close(is_finite=True)
    logits = np.concatenate(parts).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    shares: np.ndarray = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return shares


def _print_distance(name: str, wide: list[np.ndarray], packed: list[np.ndarray]) -> None:
    pairs = list(zip(wide, packed, strict=True))
    divergence = np.concatenate([(np.exp(one) * (one - other)).sum(axis=-1) for one, other in pairs])
    same = np.concatenate([one.argmax(axis=-1) == other.argmax(axis=-1) for one, other in pairs])
    print(
        f"\n{name}: KL {divergence.mean():.1e} on average, {divergence.max():.1e} at most; "
        f"the most likely token is the same {same.mean():.2%} of {same.size:,} times",
        flush=True,
    )


def _print_perplexity(name: str, kernels: str) -> None:
    from tokenizers import Tokenizer

    from tools.pico import corpus
    from tools.pico.corpus import StoryDocument
    from zmqengine.pico import model_path

    tokenizer = Tokenizer.from_file(str(model_path(name) / "tokenizer.json"))
    stories = (each for each in corpus.documents("held_out", 3) if isinstance(each, StoryDocument))
    prompts = [tokenizer.encode(story.text).ids for story in itertools.islice(stories, STORIES)]
    decoder = _decoder(model_path(name), kernels)
    wide, packed = (
        [_log_shares(runner, prompt) for prompt in prompts]
        for runner in _runners(decoder, max(map(len, prompts)))
    )
    _print_distance(name, wide, packed)
    perplexities = []
    for shares in (wide, packed):
        told = [one[np.arange(len(ids) - 1), ids[1:]] for one, ids in zip(shares, prompts, strict=True)]
        perplexities.append(np.exp(-np.concatenate(told).mean()))
    print(f"{name}: perplexity {perplexities[0]:.4f}, in 8 bits {perplexities[1]:.4f}")


if __name__ == "__main__":
    main()
