"""Failures of the device at the border to MLX, under the worker's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from tests.support.engines import greedy, make_engine
from tests.support.models import build_model
from tests.worker.harness import Harness
from tests.worker.test_device_errors import REPEATED
from zmqengine.engine.fake.fake_engine import FakeEngine
from zmqengine.engine.step.mlx_engine import MlxEngine
from zmqengine.engine.step.pacing import TOKENS_START


class EngineHarness(Harness):
    """An actor on the engine itself."""

    def __init__(self, directory: Path, engine: MlxEngine) -> None:
        super().__init__(directory, cast(FakeEngine, engine))
        self.rows = engine._rows

    def check(self) -> None:
        rows = self.engine._rows  # type: ignore[attr-defined]
        assert set(rows) == set(self.actor.scheduler.running)


@pytest.mark.parametrize("name", ["metal memory", "metal interactivity"])
def test_the_engine_repeats_what_mlx_could_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """MLX raises where work is started: caches are given back, chunks are halved, and every row has its tokens."""
    model = build_model()
    engine = make_engine(model)
    prompts = [[1 + (row * 31 + place * 7) % 300 for place in range(200)] for row in range(3)]
    wanted = [greedy(model, prompt, 20) for prompt in prompts]
    start, calls, cleared = mx.async_eval, [0], list[None]()

    def started(*arrays: Any) -> None:
        calls[0] += 1
        if calls[0] in (2, 9, 25):
            raise RuntimeError(REPEATED[name])
        start(*arrays)

    harness = EngineHarness(tmp_path / "w", engine)
    try:
        front_end = harness.front_end()
        monkeypatch.setattr(mx, "async_eval", started)
        monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(None))
        inserts = [
            front_end.insert_message(f"r{row}", prompt, max_tokens=20) for row, prompt in enumerate(prompts)
        ]
        for insert in inserts:
            front_end.send(insert)
        front_end.wait_for_end(*(insert.request for insert in inserts))
        assert [front_end.tokens[insert.request] for insert in inserts] == wanted
        assert harness.actor.counters.engine_failures == 3
        assert len(cleared) >= 3
        # From 2,048 at the first: without these three it would be 1,024.
        assert engine.shrink_chunk() == TOKENS_START
        assert harness.actor.counters.tokens == 60
    finally:
        harness.close()
        engine.close()
