"""Our step against bare mlx-lm's, in one process, in turns: `python tests/engine/step/compare_step.py [rows] [rounds]`.

Prints tokens a second of whole runs (64 tokens in, 64 out) and the median time of a decode step.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from zmqengine.engine.host.blas import load_tuned_blas

print("blas:", load_tuned_blas())

from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from tests.support.engines import runner_of  # noqa: E402
from tests.support.models import LLAMA, build_model  # noqa: E402
from zmqengine.engine.interface import ModelInfo, RowRequest, Sampling  # noqa: E402
from zmqengine.engine.load.loader import evaluate  # noqa: E402
from zmqengine.engine.options import EngineOptions  # noqa: E402
from zmqengine.engine.step.mlx_engine import MlxEngine  # noqa: E402

SHAPES = {
    "tiny": {
        **LLAMA,
        "vocab_size": 1000,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 256,
    },
    "small": {
        **LLAMA,
        "vocab_size": 8000,
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
TOKENS = 64


def bare(model, prompts, sampler):
    generator = BatchGenerator(model, max_tokens=TOKENS, sampler=sampler, prefill_batch_size=32)
    began = time.perf_counter()
    generator.insert(prompts)
    steps, tokens = [], 0
    while tokens < TOKENS * len(prompts):
        started = time.perf_counter()
        reading, made = generator.next()
        tokens += len(made)
        if made and not reading:
            steps.append(time.perf_counter() - started)
    return tokens / (time.perf_counter() - began), statistics.median(steps)


def ours(engine, prompts, sampling):
    began = time.perf_counter()
    engine.insert(
        [RowRequest(i, prompt, TOKENS, sampling=sampling, seed=i) for i, prompt in enumerate(prompts)]
    )
    steps, tokens = [], 0
    while tokens < TOKENS * len(prompts):
        started = time.perf_counter()
        result = engine.next()
        tokens += len(result.tokens)
        if result.tokens and not result.prefills:
            steps.append(time.perf_counter() - started)
    return tokens / (time.perf_counter() - began), statistics.median(steps)


def main(rows: int = 32, rounds: int = 9, shape: str = "tiny", temperature: float = 0.0, top_p: float = 1.0):
    config = SHAPES[shape]
    model = build_model(config)
    info = ModelInfo(shape, config["vocab_size"], 2048, frozenset(), evaluate(model))
    print(f"{shape}: {info.parameter_bytes / 4e6:.2f} M parameters, {rows} rows")
    engine = MlxEngine(runner_of(model), info, EngineOptions(prefill_ms=0))
    sampling = Sampling(temperature=temperature, top_p=top_p)
    sampler = make_sampler(temp=temperature, top_p=top_p if top_p < 1 else 0.0)
    draw = random.Random(0)
    figures: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    for round_ in range(rounds + 2):
        prompts = [[draw.randrange(info.vocab_size) for _ in range(64)] for _ in range(rows)]
        turns = {
            "bare": lambda p=prompts: bare(model, p, sampler),
            "ours": lambda p=prompts: ours(engine, p, sampling),
        }
        for name in list(turns)[:: 1 if round_ % 2 else -1]:
            figure = turns[name]()
            if round_ > 1:
                figures[name].append(figure)
    medians = {
        name: [statistics.median(column) for column in zip(*rows_, strict=True)]
        for name, rows_ in figures.items()
    }
    for name, (rate, step) in medians.items():
        print(f"{name}: {rate:8.0f} tok/s, step {step * 1e6:7.0f} us")
    (our_rate, our_step), (bare_rate, bare_step) = medians["ours"], medians["bare"]
    print(f"ratio: {our_rate / bare_rate:.3f} tok/s, {bare_step / our_step:.3f} steps")


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, int, str, float, float), sys.argv[1:], strict=False)))
