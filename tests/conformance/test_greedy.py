"""Greedy tokens through the worker are those of mlx-lm in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.workers import WorkerProcess
from zmqengine_client import Client

pytestmark = pytest.mark.process

MAX_TOKENS = 60
STARTS = ("Once upon a time", "One day", "There was a little", "In the morning")
ENDS = ("", " there was", " a boy named Tom", " the sun was")
PROMPTS = [start + end for start in STARTS for end in ENDS]

# In a process of its own: this one stays free of MLX, as a front-end is.
REFERENCE = """
import json, sys
from zmqengine.engine.host.blas import load_tuned_blas
load_tuned_blas()
from mlx_lm import load, stream_generate
from zmqengine.pico import model_path
asked = json.load(sys.stdin)
model, tokenizer = load(str(model_path(asked["model"])))
out = []
for prompt in asked["prompts"]:
    ids = tokenizer.encode(prompt)
    answer = stream_generate(model, tokenizer, ids, max_tokens=asked["max_tokens"])
    out.append([ids, [response.token for response in answer]])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A real worker on pico, with its prompt cache off: whatever is reused must not matter, and is tested below."""
    with WorkerProcess(None, prompt_cache_bytes=0) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> list[tuple[list[int], list[int]]]:
    """Prompt ids and greedy tokens of mlx-lm for every prompt."""
    pairs = greedy("pico", PROMPTS)
    assert len(pairs) == len(PROMPTS) == 16
    return pairs


def greedy(model: str, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    """What mlx-lm makes of these prompts, one by one, with a bundled model."""
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        check=False,
        input=json.dumps({"model": model, "prompts": prompts, "max_tokens": MAX_TOKENS}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [(ids, tokens) for ids, tokens in json.loads(done.stdout)]


def test_greedy_tokens_alone_equal_those_of_mlx_lm(
    worker: WorkerProcess, reference: list[tuple[list[int], list[int]]]
) -> None:
    """One request at a time."""
    with Client(worker.address) as client:
        for ids, tokens in reference[::2]:
            assert client.generate_tokens(ids, max_tokens=MAX_TOKENS).read().tokens == tokens


def test_greedy_tokens_of_sixteen_at_once_equal_those_of_mlx_lm(
    worker: WorkerProcess, reference: list[tuple[list[int], list[int]]]
) -> None:
    """smg bench "stalls at 16 users": sixteen in one batch, from one client, all complete and unchanged."""
    with Client(worker.address) as client:
        streams = [client.generate_tokens(ids, max_tokens=MAX_TOKENS) for ids, _ in reference]
        got = [stream.read().tokens for stream in streams]
    assert got == [tokens for _, tokens in reference]


def test_a_cached_prefix_changes_no_token(reference: list[tuple[list[int], list[int]]]) -> None:
    """A prompt that continues an earlier one is served from the cache, says so, and gives the same tokens."""
    ids, tokens = reference[0]
    longer = (ids + tokens)[:40]
    assert len(longer) == 40
    with WorkerProcess(None) as running, running.client() as client:
        fresh = client.generate_tokens(longer, max_tokens=20).read()
        again = client.generate_tokens(longer, max_tokens=20).read()
        assert fresh.cached_tokens == 0
        assert again.cached_tokens == 39
        assert fresh.tokens == again.tokens == tokens[40 - len(ids) : 60 - len(ids)]


@pytest.mark.slow
def test_greedy_tokens_of_pico_tools_equal_those_of_mlx_lm() -> None:
    """Its rotary frequencies are scaled: alone and in a batch, also far from the beginning."""
    ask = "<|user|>What is 12 + 30?<|end|><|assistant|>"
    long = "Tom has a red ball. Tom is happy. " * 120
    expected = greedy("pico-tools", [ask, f"<|system|>{long}<|end|>{ask}", "Once upon a time"])
    with WorkerProcess(None, model="pico-tools") as running, running.client() as client:
        streams = [client.generate_tokens(ids, max_tokens=MAX_TOKENS) for ids, _ in expected]
        assert [stream.read().tokens for stream in streams] == [tokens for _, tokens in expected]
    assert len(expected[1][0]) > 1000
