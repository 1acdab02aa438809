"""Frames that get lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.front_end import FrontEndProcess, total
from tests.support.workers import WorkerProcess
from zmqengine.engine.fake.fake_engine import FakeEngineConfig

FAKE = FakeEngineConfig(step_ms=1.0)


@pytest.mark.process
def test_every_tenth_frame_lost_costs_no_token(
    make_worker: Callable[..., WorkerProcess], make_front_end: Callable[..., FrontEndProcess]
) -> None:
    """A gap, or a watermark ahead, brings the tokens from the worker's log, each once and in order."""
    worker = make_worker(FAKE, fault_drop_frames=0.1)
    front_ends = [
        make_front_end(worker, number=number, streams=4, streams_total=24, fake=FAKE.to_json())
        for number in range(4)
    ]
    tally = total(front_end.finish() for front_end in front_ends)
    assert tally.errors == []
    assert (tally.streams, tally.missing, tally.repeated, tally.wrong) == (96, 0, 0, 0)
    assert tally.gaps > 50
