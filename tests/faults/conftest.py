"""Workers and front-ends that leave nothing running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.faults.front_end import FrontEndProcess, Job
from tests.support.workers import WorkerProcess


@pytest.fixture
def make_worker() -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(WorkerProcess(*args, **options))


@pytest.fixture
def make_front_end() -> Iterator[Callable[..., FrontEndProcess]]:
    """Starts front-end processes; the arguments are fields of `Job`."""
    started: list[FrontEndProcess] = []

    def start(worker: WorkerProcess, **job: Any) -> FrontEndProcess:
        started.append(FrontEndProcess(Job(address=worker.address, **job)))
        return started[-1]

    yield start
    for front_end in started:
        front_end.close()
