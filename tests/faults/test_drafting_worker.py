"""A worker that drafts says so, and a crash in the middle of its windows loses, repeats and changes nothing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.speculation import echo_model
from tests.support.drafters import EAGLE, TARGET, eagle_tensors, save_drafter
from tests.support.models import build_tokenizer, save_model
from tests.support.workers import WorkerProcess
from zmqengine.errors import BadRequest

pytestmark = pytest.mark.process

KILLS = int(os.environ.get("ZMQENGINE_DRAFTING_KILLS", "25"))
WORDS = 120
ROWS, QUEUED = 32, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The echo model on disk, as mlx-lm loads it."""
    directory: Path = tmp_path_factory.mktemp("models") / "echo"
    directory.mkdir()
    parameters = dict(tree_flatten(echo_model.build(WORDS, hidden=192, layers=1).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), parameters)
    config = echo_model.config(192, 1) | {"eos_token_id": echo_model.END}
    (directory / "config.json").write_text(json.dumps(config))
    build_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(directory)


def test_a_completion_tells_of_its_drafts_and_a_request_may_do_without(
    make_worker: Callable[..., WorkerProcess], model: str
) -> None:
    """The tokens are the same; status counts what the completion says."""
    text = echo_model.document(random.Random(1), WORDS)
    with make_worker(None, model=model, speculate="ngram", supervise=False).client() as client:
        asked: Any = {"max_tokens": 2 * WORDS, "stop_token_ids": [echo_model.END]}
        drafted = client.generate_tokens(echo_model.prompt(text), **asked).read()
        plain = client.generate_tokens(echo_model.prompt(text), speculate=False, **asked).read()
        assert drafted.tokens == plain.tokens == echo_model.answer(text)
        assert plain.drafts == {}
        numbers = client.status().numbers
        for name, (proposed, accepted) in drafted.drafts.items():
            assert 0 <= accepted <= proposed
            assert (numbers[f"drafted_{name}"], numbers[f"drafts_accepted_{name}"]) == (proposed, accepted)


def test_what_the_sender_expects_is_drafted(make_worker: Callable[..., WorkerProcess], model: str) -> None:
    """The tokens are those without it. What is longer than the worker takes is cut by the client."""
    text = echo_model.document(random.Random(4), WORDS)
    wanted = echo_model.answer(text)
    with make_worker(None, model=model, speculate="auto", supervise=False).client() as client:
        asked: Any = {"max_tokens": 2 * WORDS, "stop_token_ids": [echo_model.END]}
        prompt = echo_model.prompt(text)
        for prediction in (wanted, wanted * 100, [5] * 40):
            completion = client.generate_tokens(prompt, prediction=prediction, **asked).read()
            assert completion.tokens == wanted
        with pytest.raises(BadRequest, match="prediction"):
            client.generate_tokens(prompt, prediction=[10**6], **asked).read()
        with pytest.raises(BadRequest, match="token ids"):
            client.generate_tokens(prompt, prediction="text", **asked).read()


def test_a_drafter_in_a_directory_changes_no_token(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """The worker says what drafts; status counts what completions say."""
    model = save_model(tmp_path / "model", TARGET)
    drafter = save_drafter(tmp_path / "drafter", EAGLE, eagle_tensors(EAGLE))
    worker = make_worker(None, model=str(model), draft=str(drafter), speculate="auto", supervise=False)
    with worker.client() as client:
        asked: Any = {"max_tokens": 60, "seed": 5, "temperature": 0.8}
        drafted = [client.generate_tokens([3, 1, 4, 1, 5], **asked).read() for _ in range(3)]
        plain = client.generate_tokens([3, 1, 4, 1, 5], speculate=False, **asked).read()
        assert {tuple(each.tokens) for each in drafted} == {tuple(plain.tokens)}
        status = client.status()
        assert status.facts["draft_head"] == "an EAGLE-3 drafter"
        for name in {name for each in drafted for name in each.drafts}:
            counts = [each.drafts.get(name, (0, 0)) for each in drafted]
            proposed, accepted = map(sum, zip(*counts, strict=True))
            numbers = status.numbers[f"drafted_{name}"], status.numbers[f"drafts_accepted_{name}"]
            assert numbers == (proposed, accepted)


def test_a_prompt_that_is_read_in_part_survives_a_kill(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """The next worker chooses the same tokens of it, so the stream goes on with the same output."""
    model = str(save_model(tmp_path / "model"))
    draw = random.Random(3)
    prompt = [draw.randrange(5, 300) for _ in range(700)]
    asked: Any = {"max_tokens": 1200, "ignore_eos": True, "prefill_keep": 0.5}
    worker = make_worker(None, model=model, draft=model, restarts_max=20, restart_wait_ms=1)
    with worker.client() as client:
        # A stream may end before the kill arrives; then the next one is tried.
        for seed in range(20):
            wanted = client.generate_tokens(prompt, seed=seed, temperature=0.8, **asked).read()
            assert 350 <= wanted.kept_tokens < 350 + 32
            stream = client.generate_tokens(prompt, seed=seed, temperature=0.8, **asked)
            next(stream)
            worker.kill_engine()
            survived = stream.read()
            assert survived.tokens == wanted.tokens
            assert survived.kept_tokens in (wanted.kept_tokens, 0)
            if survived.resumed:
                break
        assert survived.resumed
        assert survived.kept_tokens == wanted.kept_tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_32_drafting_streams_lose_and_change_nothing_over_many_kills(
    make_worker: Callable[..., WorkerProcess], model: str
) -> None:
    """SIGKILL at random moments; each stream, whatever it lived through, is its document said again."""
    draw = random.Random(2)
    worker = make_worker(
        None,
        model=model,
        speculate="ngram",
        rows_max=ROWS,
        restarts_max=10 * KILLS,
        restart_wait_ms=1,
        restart_wait_max_ms=1,
    )
    hits = rounds = resumed = proposed = 0
    with worker.client() as client:
        # A kill counts if it hit a stream: nothing says how far the engine gets between a token and the signal.
        while hits < KILLS:
            assert rounds < 10 * KILLS, f"{rounds} kills resumed streams {hits} times"
            rounds += 1
            texts = [echo_model.document(draw, WORDS) for _ in range(ROWS + QUEUED)]
            streams = [
                client.generate_tokens(
                    echo_model.prompt(text), max_tokens=2 * WORDS, stop_token_ids=[echo_model.END]
                )
                for text in texts
            ]
            # At the kill this stream has most of its tokens before it, and some of the last ones have not begun.
            watched, tokens_before = streams[draw.randrange(ROWS)], draw.randrange(1, WORDS // 3)
            while tokens_before > 0:
                tokens_before -= len(next(watched).tokens)
            worker.kill_engine()
            completions = [stream.read() for stream in streams]
            assert [completion.tokens for completion in completions] == [
                echo_model.answer(text) for text in texts
            ]
            resumed += sum(completion.resumed for completion in completions)
            hits += any(completion.resumed for completion in completions)
            proposed += sum(
                numbers[0] for completion in completions for numbers in completion.drafts.values()
            )
    print(f"{rounds} kills: {resumed} streams resumed, {proposed} tokens drafted after the last kill of each")
    assert proposed > 0
