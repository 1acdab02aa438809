"""A client that goes away takes its work with it: streaming or not, running or queued, or still tokenising."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.http.front import Front, chat, post, send, serving, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client
from zmqengine_http import HttpConfig

ROWS = 2
LONG = {"ignore_eos": True, "max_tokens": 100_000}


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[FakeWorker]:
    """Two rows of 5 ms steps: a request of 100,000 tokens is there until it is aborted."""
    config = FakeEngineConfig(step_ms=5, rows_max=ROWS, context_tokens=200_000)
    with FakeWorker(config, process=True, rows_max=ROWS) as worker:
        yield worker


@pytest.fixture(scope="module")
def front(slow_worker: FakeWorker) -> Iterator[Front]:
    with serving(HttpConfig(workers=(slow_worker.address,), probe_ms=200)) as front:
        yield front


def running(worker: FakeWorker) -> float:
    """Requests that the worker holds, running or queued."""
    with Client(worker.address) as client:
        numbers = client.status().numbers
    return sum(numbers[name] for name in ("rows_prefilling", "rows_decoding", "queued") if name in numbers)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 5])
def test_a_client_that_leaves_frees_its_rows(
    front: Front, slow_worker: FakeWorker, stream: bool, n: int
) -> None:
    """mlx_lm.server, mlx-vlm, mlx-openai-server, measured: a non-streaming client that leaves is not noticed.

    mlx-openai-server #321, omlx #2260: clients that gave up kept the GPU busy. With n=5, three are queued.
    """
    connection = send(front, chat(stream=stream, n=n, **LONG))
    wait_until(lambda: running(slow_worker) == n, "the worker has the requests")
    connection.close()
    wait_until(lambda: running(slow_worker) == 0, "the worker is free")
    assert front.service.pool.workers[0].running == 0
    assert post(front, "/v1/chat/completions", chat(max_tokens=2)).status == 200


def test_others_go_on_when_one_leaves(front: Front, slow_worker: FakeWorker) -> None:
    """The neighbour in the batch gets every token it would have got alone."""
    alone = post(front, "/v1/completions", {"prompt": [7], "seed": 1, "max_tokens": 60}).json["choices"]
    connection = send(front, chat(stream=True, **LONG))
    wait_until(lambda: running(slow_worker) == 1, "the worker has the request")
    neighbour = send(front, {"prompt": [7], "seed": 1, "max_tokens": 60}, "/v1/completions")
    # Asked here: a client of the worker would start so slowly on a busy machine that the neighbour might be over.
    wait_until(lambda: front.service.pool.workers[0].running == 2, "and its neighbour's")
    connection.close()
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        data += neighbour.recv(65536)
    neighbour.close()
    assert json.loads(data.partition(b"\r\n\r\n")[2])["choices"] == alone


def test_a_client_that_stops_reading_disturbs_nobody(front: Front, slow_worker: FakeWorker) -> None:
    """Its stream waits, in memory of a bounded size; the others are served."""
    connection = send(front, chat(stream=True, **LONG))
    wait_until(lambda: running(slow_worker) == 1, "the worker has the request")
    assert post(front, "/v1/chat/completions", chat(max_tokens=20)).status == 200
    connection.close()
    wait_until(lambda: running(slow_worker) == 0, "the worker is free")
