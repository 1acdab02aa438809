"""A front-end on a worker with the fake engine, shared by the tests of one file."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.http.front import Front, serving
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig


@pytest.fixture(autouse=True)
def quiet_logs() -> Iterator[None]:
    """What a test did to the log is undone: its handlers write to a stream that is gone afterwards."""
    yield
    for name in ("zmqengine.http", "zmqengine.client", "uvicorn.error"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files and batches of these tests are not those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """A worker on the fake engine: vocabulary 1000, context 4096, ids 1 to 256 are bytes, 0 ends."""
    with FakeWorker(FakeEngineConfig(eos_index=50), process=True) as worker:
        yield worker


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    """A front-end on that worker."""
    with serving(HttpConfig(workers=(worker.address,), probe_ms=200)) as front:
        yield front
