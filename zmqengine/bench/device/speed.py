"""Decode and prefill of the engine against mlx-lm's own generator, on the same random model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator

from zmqengine.bench.device.driving import measured_model, opened, prompt_of, run
from zmqengine.bench.device.verdict import Verdict
from zmqengine.bench.servers.bare_generator import BareJob, run_job

_TOKENS, _PROMPT = 96, 128


def check() -> Iterator[Verdict]:
    """Tokens a second of 1, 4 and 8 rows, prompts of 128 tokens included; figures, not verdicts."""
    rows = (1, 4, 8)
    with measured_model() as model:
        found = opened(model, warm_up_s=30.0)
        yield Verdict("tuned", None, "; ".join(f"{name}: {fact}" for name, fact in found.facts.items()))
        engine = found.engine
        vocab_size = engine.info.vocab_size
        run(engine, [prompt_of(_PROMPT, vocab_size, 99)], _TOKENS)
        ours = {}
        for count in rows:
            prompts = [prompt_of(_PROMPT, vocab_size, 100 * count + row) for row in range(count)]
            started_s = time.perf_counter()
            made = sum(map(len, run(engine, prompts, _TOKENS).tokens.values()))
            ours[count] = made / (time.perf_counter() - started_s)
        engine.close()
        del engine, found
        mx.clear_cache()
        network, _ = mlx_lm.load(str(model))[:2]
        generator = BatchGenerator(network, stop_tokens=[], completion_batch_size=max(rows))
        run_job(
            generator, BareJob(prompts=[prompt_of(_PROMPT, vocab_size, 99)], max_tokens=_TOKENS, streams=1)
        )
        for count in rows:
            prompts = [prompt_of(_PROMPT, vocab_size, 100 * count + row) for row in range(count)]
            bare = run_job(generator, BareJob(prompts=prompts, max_tokens=_TOKENS, streams=count))
            theirs = bare.tokens / bare.wall_s
            text = f"{ours[count]:.0f} tokens/s, mlx-lm {theirs:.0f}: {ours[count] / theirs:.2f} times"
            yield Verdict(f"{count} rows", None, text)
