"""`python -m benchmarks.embeddings`: texts a second of a worker, mlx-embeddings and vllm-mlx; streams beside a flood.

The model has the shape of all-MiniLM-L6 with random weights and pico-embed's tokenizer; texts are sentences and parts
of pico's stories. All are asked in turns. The worker is a process of its own, asked over ipc by clients that tokenize;
the others compute in their process, one request after the other. `--mlx-embeddings PYTHON` and `--vllm-mlx PYTHON` name
a Python that has them; on a Linux CPU it wants the BLAS that zmqengine loads in LD_PRELOAD. With `--processor-time` a
second is one of processor time, of client and worker together, as on a machine that is busy with other programs; set
OPENBLAS_NUM_THREADS=1 then, as threads that wait for work count too. Steps beside texts are timed in this process too,
in processor time.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

# First: the environment of other processes. Then the engine before MLX, which binds to a BLAS when it is imported.
from benchmarks.other_process import ENVIRONMENT, OtherProcess  # isort: skip
from zmqengine.engine.open import find_encoder_backend, open_mlx_engine  # isort: skip

import mlx.core as mx

from tools.pico import corpus
from tools.pico.embedding.directory import model_config, write_model
from zmqengine.checkpoint.on_disk import local_directory
from zmqengine.checkpoint.recipe import read_recipe
from zmqengine.engine.embedding.encoders.bert import Bert
from zmqengine.engine.embedding.opening import open_encoder, read_texts
from zmqengine.engine.interface import Engine, RowRequest, TextsRequest, VectorEngine
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.pico import BUNDLED, model_path
from zmqengine_client import AsyncClient

WIDTH, LAYERS = 384, 6
STREAMS = 8
STREAM_TOKENS = 400
_TURN_STEPS, _SETTLING_STEPS = 40, 12


def write_checkpoint(directory: Path) -> None:
    """The model, as sentence-transformers publishes such."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path("pico-embed") / "tokenizer.json"))
    config = model_config(tokenizer.get_vocab_size(), WIDTH, LAYERS)
    mx.random.seed(0)
    write_model(directory, Bert(config), config, tokenizer)
    # mlx-embeddings wants the pooler of BERT's pre-training, which nothing here uses.
    file = str(directory / "model.safetensors")
    arrays = mx.load(file)
    assert isinstance(arrays, dict)
    pooler = {"pooler.dense.weight": mx.zeros((WIDTH, WIDTH)), "pooler.dense.bias": mx.zeros(WIDTH)}
    mx.save_safetensors(file, {**arrays, **pooler}, metadata={"format": "pt"})


def texts_of(count: int, seed: int) -> list[str]:
    """Sentences, and paragraphs of up to some hundred tokens."""
    draw = random.Random(seed)
    found: list[str] = []
    for document in corpus.documents("train", seed):
        sentences = document.text.split(". ")
        while sentences and len(found) < count:
            taken = draw.choice((1, 1, 1, 2, 4))
            found.append(". ".join(sentences[:taken])[:600])
            sentences = sentences[taken:]
        if len(found) == count:
            return found
    raise AssertionError


Clock = Callable[[], float]


async def seconds_of_ours(
    address: str, requests: Sequence[Sequence[str]], clients: int, clock: Clock
) -> float:
    """Seconds for these requests by `clients` clients, each of which sends one after the other."""
    opened = [AsyncClient(address) for _ in range(clients)]
    try:
        await asyncio.gather(*(client.embed(["warm up"]) for client in opened))
        waiting = iter(requests)

        async def ask(client: AsyncClient) -> None:
            for texts in waiting:
                await client.embed(texts, priority=0)

        started = clock()
        await asyncio.gather(*(ask(client) for client in opened))
        return clock() - started
    finally:
        await asyncio.gather(*(client.close() for client in opened))


async def gaps_ms(address: str) -> tuple[list[float], float]:
    """Milliseconds between neighbouring tokens of `STREAMS` streams, and tokens that the worker read in a second."""
    gaps: list[float] = []
    async with AsyncClient(address) as client:

        async def stream(number: int) -> None:
            last: float | None = None
            prompt = [5 + number, *range(6, 30)]
            async for _ in client.generate_tokens(
                prompt, max_tokens=STREAM_TOKENS, ignore_eos=True, speculate=False
            ):
                now = time.perf_counter()
                if last is not None:
                    gaps.append((now - last) * 1000)
                last = now

        started, before = time.perf_counter(), await _tokens_read(client)
        await asyncio.gather(*(stream(number) for number in range(STREAMS)))
        read = await _tokens_read(client) - before
        return gaps, read / (time.perf_counter() - started)


async def _tokens_read(client: AsyncClient) -> float:
    return (await client.status()).numbers["prompt_tokens"]


@contextmanager
def flooded(address: str, file: Path) -> Iterator[None]:
    """Has another process embed the texts in the lines of `file`, as a batch job does; the worker has read some."""
    command = ["embed", str(file), "--worker", address, "--out", f"{file}.npy"]
    process = subprocess.Popen([sys.executable, "-m", "zmqengine.cli.main", *command], env=ENVIRONMENT)
    try:
        asyncio.run(_reading(address))
        yield
        if process.poll() is not None:
            raise click.ClickException("the flood ended before the streams: give more texts")
    finally:
        process.terminate()
        process.wait(60)


async def _reading(address: str) -> None:
    async with AsyncClient(address) as client:
        before = await _tokens_read(client)
        while await _tokens_read(client) == before:
            await asyncio.sleep(0.05)


def tokens_of(texts: Sequence[str], tokenizer_json: Path) -> list[list[int]]:
    """Texts as token ids."""
    from tokenizers import Tokenizer

    return [encoded.ids for encoded in Tokenizer.from_file(str(tokenizer_json)).encode_batch(list(texts))]


def product_share(model: Path, size: int) -> tuple[float, float]:
    """Milliseconds of processor time of a text in requests of `size`, and the share of the products alone in them."""
    recipe, options = read_recipe(model), EngineOptions()
    engine = open_encoder(
        model,
        recipe,
        backend=find_encoder_backend(),
        name="e",
        options=options,
        limit_memory=lambda most, _: most,
        report=lambda *_: None,
    ).engine
    layers: list[Any] = engine._model._encoder.layers  # type: ignore[attr-defined]
    texts = tokens_of(texts_of(max(32, 2 * size), 3), model / "tokenizer.json")
    shares, times_s = [], []
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        began_s = time.process_time()
        embed_all(engine, batch)
        times_s.append(time.process_time() - began_s)
        states = mx.ones((sum(map(len, batch)), WIDTH))
        began_s = time.process_time()
        for layer in layers:
            attended = (states @ layer.qkv.weight)[:, :WIDTH] @ layer.out.weight
            states = attended @ layer.up.weight @ layer.down.weight
        mx.eval(states)
        shares.append((time.process_time() - began_s) / times_s[-1])
    return 1000 * statistics.median(times_s) / size, statistics.median(shares)


def embed_all(engine: Engine | VectorEngine, texts: list[list[int]]) -> None:
    """Step until these texts have their vectors."""
    engine.embed([TextsRequest(0, texts)])
    while not any(vectors.is_whole for vectors in engine.next().vectors):
        pass


def open_decoder(directory: Path) -> MlxEngine:
    """The engine of a model that generates and reads texts."""
    opened = open_mlx_engine(str(directory), EngineOptions(warm_up_s=0, speculate="off"))
    read_texts(opened.engine, opened.runner, read_recipe(directory))
    return opened.engine


def step_ms(engine: MlxEngine, flood: list[list[int]]) -> tuple[list[float], list[float], float]:
    """Milliseconds of processor time of steps of `STREAMS` rows alone and beside a flood, each sorted.

    Then tokens of texts read in a second of the latter. Both are measured in turns of some steps, after others in which
    the pace settles.
    """
    engine.reset()
    engine.insert([RowRequest(row, [5 + row, *range(6, 30)], STREAM_TOKENS * 3) for row in range(STREAMS)])
    alone, beside = [], []
    tokens = 0
    for row in range(STREAMS, STREAMS + STREAM_TOKENS // _TURN_STEPS):
        _steps_ms(engine, _SETTLING_STEPS)
        alone += _steps_ms(engine, _TURN_STEPS)
        engine.embed([TextsRequest(row, flood)])
        _steps_ms(engine, _SETTLING_STEPS)
        before = engine.stats().prompt_tokens
        beside += _steps_ms(engine, _TURN_STEPS)
        tokens += engine.stats().prompt_tokens - before
        assert engine.stats().rows_prefilling, "the flood outlasts a turn"
        engine.remove([row])
    return sorted(alone), sorted(beside), 1000 * tokens / sum(beside)


def _steps_ms(engine: MlxEngine, steps: int) -> list[float]:
    times_ms = []
    for _ in range(steps):
        began_s = time.process_time()
        engine.next()
        times_ms.append(1000 * (time.process_time() - began_s))
    return times_ms


@contextmanager
def worker_of(model: str, directory: Path) -> Iterator[tuple[str, int]]:
    """The address of a worker of a model, and the id of its process."""
    address = f"ipc://{directory}/w-{Path(model).name}/ctl"
    command = [
        "zmqengine",
        "worker",
        "--model",
        model,
        "--bind",
        address,
        "--no-supervise",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen([sys.executable, "-m", "zmqengine.cli.main", *command[1:]], env=ENVIRONMENT)
    try:
        asyncio.run(_ready(address))
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(60)


async def _ready(address: str) -> None:
    async with AsyncClient(address, connect_timeout_s=60) as client:
        await client.wait_ready()


@click.command()
@click.option("--mlx-embeddings", help="A Python with mlx-embeddings, to be measured too.")
@click.option("--vllm-mlx", help="A Python with vllm-mlx, to be measured too.")
@click.option("--processor-time", is_flag=True, help="Count processor time, not time on the clock.")
@click.option("--rounds", default=3, show_default=True, help="Turns of each case.")
@click.option("--texts", default=512, show_default=True, help="Texts of a case in a round.")
@click.option("--chat", default="pico", show_default=True, help="Model of the streams beside the flood.")
@click.option("--flood", default=20_000, show_default=True, help="Texts beside the streams.")
def main(
    mlx_embeddings: str | None,
    vllm_mlx: str | None,
    processor_time: bool,
    rounds: int,
    texts: int,
    chat: str,
    flood: int,
) -> None:
    """Print a table of texts a second, then the gaps of streams without and beside a flood."""
    pythons = {"mlx-embeddings": mlx_embeddings, "vllm-mlx": vllm_mlx}
    directory = Path(tempfile.mkdtemp(prefix="ze-", dir="/tmp"))
    try:
        model = directory / "model"
        write_checkpoint(model)
        with worker_of(str(model), directory) as (address, process), ExitStack() as stack:
            script = Path(__file__).with_name("embeddings_of_others.py")
            name = "process_time" if processor_time else "perf_counter"
            others = {
                of: stack.enter_context(OtherProcess([python, str(script), of, str(model), name]))
                for of, python in pythons.items()
                if python
            }
            clock = partial(_processor_s, psutil.Process(process)) if processor_time else time.perf_counter
            for case, size, clients in (
                ("1", 1, 1),
                ("8", 8, 1),
                ("64", 64, 1),
                ("32 clients, 1", 1, 32),
            ):
                _throughput(case, size, clients, address, others, rounds, texts, clock)
        for size in (1, 8, 64):
            text_ms, share = product_share(model, size)
            print(
                f"{size} texts a request: {text_ms:.1f} ms of processor time each, {share:.0%} in products",
                flush=True,
            )
        found = model_path(chat) if chat in BUNDLED else local_directory(chat)
        assert found is not None, "the model of the streams is not on this machine"
        engine = open_decoder(found)
        given = tokens_of(texts_of(1024, 9), found / "tokenizer.json")
        for _ in range(rounds):
            alone, beside, speed = step_ms(engine, given)
            ratios = [beside[int(len(beside) * at)] / alone[int(len(alone) * at)] for at in (0.5, 0.9, 0.99)]
            print(
                f"{STREAMS} rows, processor time of a step: p50 {alone[len(alone) // 2]:.2f} ms, "
                f"p99 {alone[int(len(alone) * 0.99)]:.2f} ms; beside texts ({speed:.0f} tokens/s of them) "
                f"{ratios[0]:.2f} x, p90 {ratios[1]:.2f} x, p99 {ratios[2]:.2f} x",
                flush=True,
            )
        file = directory / "flood.txt"
        file.write_text("\n".join(text.replace("\n", " ") for text in texts_of(flood, 9)))
        with worker_of(chat, directory) as (address, _):
            for _ in range(rounds):
                _print_gaps("alone", *asyncio.run(gaps_ms(address)))
                with flooded(address, file):
                    _print_gaps("beside a flood", *asyncio.run(gaps_ms(address)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _print_gaps(name: str, gaps: list[float], speed: float) -> None:
    gaps.sort()
    print(
        f"{STREAMS} streams {name}: ITL p50 {statistics.median(gaps):.2f} ms, "
        f"p99 {gaps[int(len(gaps) * 0.99)]:.2f} ms; {speed:.0f} tokens/s of prompts and texts",
        flush=True,
    )


def _processor_s(worker: psutil.Process) -> float:
    times = worker.cpu_times()
    return time.process_time() + float(times.user + times.system)


def _throughput(
    case: str,
    size: int,
    clients: int,
    address: str,
    others: Mapping[str, OtherProcess],
    rounds: int,
    texts: int,
    clock: Clock,
) -> None:
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    for number in range(rounds):
        given = texts_of(texts, number)
        requests = [given[start : start + size] for start in range(0, texts, size)]
        ours.append(texts / asyncio.run(seconds_of_ours(address, requests, clients, clock)))
        for name, other in others.items():
            theirs[name].append(texts / sum(other.seconds(list(each)) for each in requests))
    line = f"{case} texts a request: {statistics.median(ours):,.1f} texts/s"
    for name, speeds in theirs.items():
        ratios = [mine / its for mine, its in zip(ours, speeds, strict=True)]
        line += f"; {name} {statistics.median(speeds):,.1f} ({statistics.median(ratios):.2f} x)"
    print(line, flush=True)


if __name__ == "__main__":
    main()
