"""A crash is a pause: the engine process is killed while many front-ends stream."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.front_end import FrontEndProcess, Tally, total
from tests.support.adapters import write_opaque_adapter
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine_client import Client, TokenStream
from zmqengine_client.errors import WorkerLost

KILLS = int(os.environ.get("ZMQENGINE_KILLS", "25"))
FAKE = FakeEngineConfig(step_ms=2.0, rows_max=32)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32_streams_of_4_front_ends_lose_and_repeat_nothing_over_many_kills(
    make_worker: Callable[..., WorkerProcess], make_front_end: Callable[..., FrontEndProcess]
) -> None:
    """mlx-lm #854, #1390, #1909: SIGKILL at random moments, loading included, and every token is right."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    worker = make_worker(FAKE, restarts_max=10 * KILLS, restart_wait_ms=1, restart_wait_max_ms=1)
    front_ends = [make_front_end(worker, number=number, fake=FAKE.to_json()) for number in range(4)]
    for front_end in front_ends:
        front_end.wait_streaming()
    with worker.client() as client:
        stream = client.generate_tokens([1, 2, 3], max_tokens=4000)
        for _ in range(KILLS):
            if moments.random() < 0.7:
                stream = next_token(client, stream)
            # The moment is what is tested; nothing is waited for here.
            time.sleep(moments.uniform(0.0, 0.5))
            worker.kill_engine()
    tally = total(front_end.finish() for front_end in front_ends)
    print(f"{KILLS} kills (seed {seed}): {tally}")
    assert tally.errors == [], f"seed {seed}"
    assert (tally.missing, tally.repeated, tally.wrong) == (0, 0, 0), f"seed {seed}"
    assert tally.streams >= 32
    assert tally.resumed >= KILLS // 2
    assert tally.restart_events == tally.restarts_seen > 0


def next_token(client: Client, stream: TokenStream) -> TokenStream:
    """Wait until the worker that lives now makes tokens."""
    resumed = client.counters.worker_restarts
    for _ in stream:
        if client.counters.worker_restarts > resumed:
            return stream
    return client.generate_tokens([1, 2, 3], max_tokens=4000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_32_streams_on_a_real_model_end_as_they_would_have_without_the_kills(
    make_worker: Callable[..., WorkerProcess],
    make_front_end: Callable[..., FrontEndProcess],
) -> None:
    """Requests on pico, half of them greedy, have the same tokens with kills as without.

    Each front-end keeps 8 streams running until all of them have been seen to, so that none is idle at the kill. A
    few streams may differ from some token on: other rows of a batch change the order of sums, which rarely tips a
    choice between two tokens, with or without a kill. If a kill cost a token, a quarter of them would.
    """
    worker = make_worker(None, restart_wait_ms=1)
    worker.wait_ready()

    def run(kills: int) -> Tally:
        front_ends = [
            make_front_end(
                worker, number=number, tokens_min=60, tokens_max=90, temperature=temperature, ignore_eos=True
            )
            for number, temperature in enumerate((0.0, 0.8, 0.0, 0.8))
        ]
        for front_end in front_ends:
            front_end.wait_streaming()
        for _ in range(kills):
            worker.kill_engine()
        return total(front_end.finish(200) for front_end in front_ends)

    undisturbed, killed = run(0), run(1)
    assert undisturbed.errors == killed.errors == []
    assert (killed.missing, killed.repeated) == (0, 0)
    assert killed.resumed >= 8
    both = killed.outputs.keys() & undisturbed.outputs.keys()
    assert len(both) >= 32
    differing = [seed for seed in both if killed.outputs[seed] != undisturbed.outputs[seed]]
    assert len(differing) <= len(both) // 8


@pytest.mark.process
def test_without_resume_a_death_ends_the_streams_with_worker_lost(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """A caller who wants to know gets the error and the tokens so far."""
    worker = make_worker(FAKE)
    with worker.client(resume=False) as client:
        stream = client.generate_tokens([1, 2, 3], max_tokens=4000)
        first = next(stream)
        worker.kill_engine()
        with pytest.raises(WorkerLost) as caught:
            stream.read()
        kept: list[int] = caught.value.completion.tokens  # type: ignore[attr-defined]
        assert kept[: len(first.tokens)] == first.tokens
        again = client.generate_tokens([1, 2, 3], max_tokens=5)
        assert len(again.read().tokens) == 5


def test_a_caller_is_told_that_the_worker_was_lost_and_came_back(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """An event and a counter, and the stream itself says how many deaths it survived."""
    worker = make_worker(FAKE)
    kinds: list[str] = []
    with worker.client(on_event=lambda event: kinds.append(event.kind)) as client:
        # On a busy machine it may be over before the kill.
        while not client.counters.resumed_streams:
            stream = client.generate_tokens([1, 2, 3], max_tokens=300)
            next(stream)
            worker.kill_engine()
            resumed = stream.read().resumed
        counters = client.counters
        assert resumed == counters.resumed_streams == kinds.count("resumed") > 0
        assert counters.worker_restarts == kinds.count("restarted") > 0


def test_a_worker_that_is_started_again_has_the_adapters_of_the_one_that_died(
    make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Those that were loaded while it ran, too: a stream goes on with its adapter. One whose files are gone is left
    out."""
    # It ends itself in the middle of the stream, in each life.
    fake = FakeEngineConfig(
        step_ms=1.0, faults=(FakeFault(place="next", action="exit", token=666, index=60),)
    )
    first, second, third = (write_opaque_adapter(tmp_path / name) for name in ("first", "second", "third"))
    worker = make_worker(fake, adapter=(f"first={first}",), restarts_max=20, restart_wait_ms=1)
    prompt = [666, 2, 3]
    with worker.client() as client:
        client.wait_ready()
        client.load_adapter("second", second)
        client.load_adapter("third", third)
        client.unload_adapter("first")
        shutil.rmtree(third)
        completion = client.generate_tokens(prompt, max_tokens=100, seed=1, adapter="second").read()
        card = client.describe().model
    assert completion.resumed >= 1
    assert completion.tokens == expected_tokens(RowRequest(0, prompt, 100, seed=1, adapter="second"))
    assert card is not None
    assert card.adapters == ["second"]
    assert "starting without an adapter" in worker.log
