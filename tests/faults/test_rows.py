"""One bad row, and steps that fail, through a real worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.workers import START_S, WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine_client import Client, ClientEvent, TokenStream
from zmqengine_client.errors import RowFailed, WorkerLost

pytestmark = pytest.mark.process

POISON = 666


def innocent_streams(client: Client, count: int = 6) -> list[tuple[RowRequest, TokenStream]]:
    """Streams without the poison, started."""
    requests = [RowRequest(row, [row + 1, 5], 300, seed=row) for row in range(count)]
    return [
        (request, client.generate_tokens(request.prompt, max_tokens=300, seed=request.seed))
        for request in requests
    ]


def assert_unharmed(streams: list[tuple[RowRequest, TokenStream]]) -> None:
    for request, stream in streams:
        assert stream.read().tokens == expected_tokens(request)
        assert stream.result.resumed == 0


@pytest.mark.parametrize("place", ["insert", "prefill", "token"])
def test_a_row_that_raises_ends_alone(make_worker: Callable[..., WorkerProcess], place: str) -> None:
    """The others get every token from the same process; the one gets `error` and what it had."""
    fault = FakeFault(
        place=place, action="fail", token=POISON, index=20 if place == "token" else None, times=None  # type: ignore[arg-type]
    )  # fmt: skip
    worker = make_worker(FakeEngineConfig(step_ms=1.0, faults=(fault,)))
    with worker.client() as client:
        streams = innocent_streams(client)
        poisoned = client.generate_tokens([POISON], max_tokens=300)
        with pytest.raises(RowFailed) as caught:
            poisoned.read()
        assert len(caught.value.completion.tokens) == (20 if place == "token" else 0)  # type: ignore[attr-defined]
        assert_unharmed(streams)
        assert client.counters.worker_restarts == 0


def test_a_row_that_breaks_every_step_is_found_and_ended(make_worker: Callable[..., WorkerProcess]) -> None:
    """smg servicer: a row that makes `next()` raise does not block the others, who lose no token."""
    fault = FakeFault(place="next", action="raise", token=POISON, times=None)
    worker = make_worker(FakeEngineConfig(step_ms=1.0, faults=(fault,)))
    with worker.client() as client:
        streams = innocent_streams(client)
        with pytest.raises(RowFailed):
            client.generate_tokens([POISON], max_tokens=300).read()
        assert_unharmed(streams)
        assert client.counters.worker_restarts == 0


def test_steps_that_fail_now_and_then_cost_nobody_anything(make_worker: Callable[..., WorkerProcess]) -> None:
    """The engine is rebuilt in the same process and the rows go back from their token logs."""
    faults = tuple(FakeFault(place="next", action="raise", index=step) for step in (10, 60))
    worker = make_worker(FakeEngineConfig(step_ms=1.0, faults=faults))
    with worker.client() as client:
        assert_unharmed(innocent_streams(client))
        assert client.counters.worker_restarts == 0


def test_an_engine_that_never_works_ends_the_process(make_worker: Callable[..., WorkerProcess]) -> None:
    """A bounded number of failures, `fatal` to the clients, then exit code 1: never log and go on for ever."""
    faults = (
        FakeFault(place="next", action="raise", token=POISON, times=None),
        FakeFault(place="reset", action="raise", times=None),
    )
    worker = make_worker(FakeEngineConfig(faults=faults), supervise=False)
    last_words: list[str] = []

    def listen(event: ClientEvent) -> None:
        if event.kind == "fatal":
            last_words.append(event.message)

    with worker.client(on_event=listen, worker_lost_timeout_s=1.0) as client:
        with pytest.raises(WorkerLost):
            client.generate_tokens([POISON], max_tokens=50).read()
        assert worker.process.wait(START_S) == 1
    assert ["could not be reset" in words for words in last_words] == [True]


def test_an_abort_whose_removal_fails_is_logged_and_harms_nobody(
    make_worker: Callable[..., WorkerProcess],
) -> None:
    """vllm-mlx #8 review: errors during a cancel were swallowed. Here they are logged, with the request's id."""
    faults = (FakeFault(place="remove", action="raise", token=POISON),)
    worker = make_worker(FakeEngineConfig(step_ms=1.0, faults=faults))
    with worker.client() as client:
        streams = innocent_streams(client)
        aborted = client.generate_tokens([POISON], max_tokens=300, request_id="aborted-one")
        next(aborted)
        aborted.abort()
        assert aborted.read().finish == "abort"
        assert_unharmed(streams)
        assert client.counters.worker_restarts == 0
    assert "fake fault at remove" in worker.log
    assert "request=aborted-one" in worker.log


def test_a_slow_pass_is_logged_with_its_phases(make_worker: Callable[..., WorkerProcess]) -> None:
    """vllm-mlx #479 review: slow-step diagnostics were lost. A slow pass says where its time went, and for whom."""
    worker = make_worker(FakeEngineConfig(step_ms=30.0), slow_pass_ms=10.0)
    with worker.client() as client:
        client.generate_tokens([1], max_tokens=3, request_id="slow-one").read()
    # On a busy machine a pass may be slow that has no request.
    line = next(line for line in worker.log.splitlines() if "slow pass" in line and "slow-one" in line)
    for word in ("pass_ms=", "next_ms=", "receive_ms=", "publish_ms=", "rows="):
        assert word in line
