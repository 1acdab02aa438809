"""A harness a test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.harness import Harness


@pytest.fixture
def make_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Harness]]:
    """Builds harnesses and closes them."""
    made: list[Harness] = []

    def make(*arguments: Any, **options: Any) -> Harness:
        directory: Path = tmp_path_factory.mktemp("w")
        made.append(Harness(directory, *arguments, **options))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    """An actor on a fake engine with default options."""
    return make_harness()


@pytest.fixture
def small_heap() -> None:
    """What other tests have left is not looked at: with all that they import it would take seconds each time."""
    gc.collect()
    gc.freeze()
