"""Real workers with `--cache-dir`: what one of them read, no other reads again, however it ended."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import greedy
from tests.support.models import HYBRID, LLAMA, MAMBA, SLIDING, VOCAB_SIZE, build_model, save_model
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS
from zmqengine.engine.prefix_cache.disk.block_file import read_header
from zmqengine_client import Client

pytestmark = pytest.mark.process

MAX_TOKENS = 8
PROMPT_TOKENS = 400
TAIL_TOKENS = 20
ANSWER_TOKENS = 1000


def numbers(client: Client) -> dict[str, Any]:
    return dict(client.status().numbers)


def wait_saved(client: Client) -> None:
    """Until all that is in memory is on disk."""

    def is_saved() -> bool:
        found = numbers(client)
        waiting = found["prompt_disk_unsaved_blocks"] or found["prompt_disk_waiting_bytes"]
        return not waiting and found["prompt_disk_written_blocks"] > 0

    wait_until(is_saved, "what was read is not saved")


def wait_known(client: Client, blocks: int) -> None:
    """Until a worker knows the blocks that another one wrote: it looks once a second."""
    wait_until(
        lambda: numbers(client).get("prompt_disk_blocks", 0) >= blocks, "what another wrote is not noticed"
    )


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, VOCAB_SIZE) for _ in range(length)]


class Talk:
    """A conversation whose answers are those of the bare model."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self._model = build_model(config)
        self.tokens = prompt_of(seed, PROMPT_TOKENS)
        self._seed = seed

    def turn(self, client: Client) -> int:
        """One answer, checked; returns how many tokens of the prompt were computed for it."""
        done = client.generate_tokens(self.tokens, max_tokens=MAX_TOKENS, ignore_eos=True).read()
        assert list(done.tokens) == greedy(self._model, self.tokens, MAX_TOKENS)
        computed = len(self.tokens) - done.cached_tokens
        self._seed += 1
        self.tokens = [*self.tokens, *done.tokens, *prompt_of(self._seed, TAIL_TOKENS)]
        return computed


@pytest.mark.parametrize(
    "config",
    [
        # It has a layer of each of the two kinds that the next two have alone.
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(LLAMA, id="llama", marks=pytest.mark.weekly),
        pytest.param(MAMBA, id="mamba", marks=pytest.mark.weekly),
        pytest.param(SLIDING, id="sliding", marks=pytest.mark.weekly),
    ],
)
def test_after_a_kill_and_in_another_worker_only_tails_are_computed(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path, config: dict[str, Any]
) -> None:
    """Two workers share a directory; one is killed and comes back, the other has never seen the prompt."""
    options = {
        "model": str(save_model(tmp_path / "model", config)),
        "cache_dir": str(tmp_path / "cache"),
        "cache_dir_free_bytes": 0,
        "restart_wait_ms": 1,
    }
    first, second = make_worker(None, **options), make_worker(None, **options)
    talk = Talk(config, seed=1)
    with first.client() as client, second.client() as other:
        assert talk.turn(client) == PROMPT_TOKENS
        wait_saved(client)
        written = numbers(client)["prompt_disk_blocks"]
        epoch = client.describe().epoch
        first.kill_engine()
        wait_known(other, written)
        assert talk.turn(other) <= TAIL_TOKENS + 1
        wait_saved(other)
        wait_until(lambda: client.describe().epoch != epoch, "the worker did not come back")
        client.wait_ready()
        # What this worker has never seen was read by the other meanwhile.
        wait_known(client, numbers(other)["prompt_disk_blocks"])
        assert talk.turn(client) <= TAIL_TOKENS + 1
        restored = numbers(client)["prompt_disk_read_blocks"]
        assert restored >= PROMPT_TOKENS // 64
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.stat().st_mode & 0o077


def test_a_stream_that_a_crash_cut_comes_back_from_disk(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """SIGKILL in the middle of an answer: it goes on with the same tokens, and of what is known by then only the answer
    and a block are computed again. SIGTERM right after its end: all of it is saved before the worker ends."""
    worker = make_worker(
        None,
        model=str(save_model(tmp_path / "model", LLAMA)),
        cache_dir=str(tmp_path / "cache"),
        cache_dir_free_bytes=0,
        restart_wait_ms=1,
    )
    with worker.client() as client:
        for seed in itertools.count(5):
            prompt = prompt_of(seed, PROMPT_TOKENS)
            client.generate_tokens(prompt, max_tokens=1, ignore_eos=True).read()
            wait_saved(client)
            epoch, engine = client.describe().epoch, worker.engine_pid()
            stream = client.generate_tokens(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            next(stream)
            os.kill(engine, signal.SIGKILL)
            done = stream.read()
            if done.resumed:
                break
            # On a busy machine an answer may be over before the crash, which came from outside: then another.
            wait_until(lambda: client.describe().epoch != epoch, "the worker did not come back")  # noqa: B023
            client.wait_ready()
        assert list(done.tokens) == greedy(build_model(LLAMA), prompt, ANSWER_TOKENS)
        found = numbers(client)
        told_before = ANSWER_TOKENS - found["tokens"]
        assert told_before > 0
        computed = PROMPT_TOKENS + told_before - found["prompt_cache_disk_hit_tokens"]
        assert computed <= told_before + BLOCK_TOKENS
        assert worker.terminate() == 0
    saved = [read_header(path) for path in (tmp_path / "cache").rglob("*.safetensors")]
    ends = [header.blocks[-1].start + header.blocks[-1].length for header in saved]
    # The last token of an answer is never read.
    assert max(ends) == PROMPT_TOKENS + ANSWER_TOKENS - 1


@pytest.mark.slow
def test_four_agents_on_room_for_two_have_nothing_computed_twice(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """In turn, as agents come: what memory had to let go comes from disk."""
    # Keys and values of 2 layers with 2 heads of 16 numbers of 4 bytes.
    token_bytes = 2 * 2 * 2 * 16 * 4
    turns = 5
    tokens = PROMPT_TOKENS + turns * (MAX_TOKENS + TAIL_TOKENS)
    worker = make_worker(
        None,
        model=str(save_model(tmp_path / "model", LLAMA)),
        cache_dir=str(tmp_path / "cache"),
        cache_dir_free_bytes=0,
        prompt_cache_bytes=2 * tokens * (token_bytes + 4),
    )
    agents = [Talk(LLAMA, seed) for seed in (100, 200, 300, 400)]
    with worker.client() as client:
        for turn in range(turns):
            for agent in agents:
                computed = agent.turn(client)
                # The last token of an answer has not been computed before, and each row begins with one token.
                assert computed <= (TAIL_TOKENS + 1 if turn else PROMPT_TOKENS)
                # Memory does not wait for the disk: on a busy machine it would let go what was not saved yet.
                wait_saved(client)
        found = numbers(client)
        assert found["prompt_disk_read_blocks"] > 4 * (turns - 1) * (PROMPT_TOKENS // 64) // 2
        assert found["prompt_cache_bytes"] <= found["prompt_cache_bytes_max"]
        assert found["tokens_read_again"] == 0
