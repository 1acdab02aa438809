"""Workers and clients for the tests of the two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.flavours import FLAVOURS
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client.text import tokenizer_cache


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQENGINE_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer_cache.clear()


@pytest.fixture(scope="session")
def worker() -> Iterator[FakeWorker]:
    """A worker that decodes at a pace of 2 ms a token."""
    with FakeWorker(FakeEngineConfig(step_ms=2.0)) as worker:
        yield worker


@pytest.fixture(params=FLAVOURS)
def connect(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a client of either kind, with the methods of `AsyncClient`."""
    flavour: Callable[..., Any] = FLAVOURS[request.param]
    return flavour
