"""The batching delay: an idle worker waits for the rest of a burst, and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.worker.harness import ARRIVAL_MS_MAX, FrontEnd, Harness
from zmqengine.worker import actor as actor_module
from zmqengine.worker.actor import PassReport
from zmqengine.worker.scheduler.batching_delay import AGAIN_S, LOOK_S, WAIT_S_MAX, BatchingDelay

LOOKS_MAX = int(WAIT_S_MAX / LOOK_S)


Begin = Callable[..., tuple[PassReport, int]]


def send(harness: Harness, front_end: FrontEnd, name: str) -> None:
    """A request that is there when the actor looks."""
    front_end.send(front_end.insert_message(name, max_tokens=2))
    assert harness.sockets.cmd.poll(ARRIVAL_MS_MAX)


@pytest.fixture
def begin(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Ends some requests in one step; then, so many seconds later, one comes, and another one with each look.

    Gives what the pass did in which the first came, and how often it looked for others.
    """

    def run(
        *, ended: int, coming: int, later_s: float = 0.0, step_s: float | None = 0.3, wait_ms: int = 0
    ) -> tuple[PassReport, int]:
        front_end = harness.front_end()
        for place in range(ended):
            # Each joins a pass after the one before, and all end in the same one.
            front_end.accepted(f"before {place}", max_tokens=ended + 1 - place)
        if step_s is not None:
            harness.actor.scheduler.rates.note_step(0, 1, step_s)
        reports = [harness.pass_()]
        while harness.actor.scheduler.running:
            reports.append(harness.pass_())
        assert reports[-1].ended == ended
        harness.clock.advance(later_s)
        names = [f"with it {place}" for place in range(coming)]
        looks = 0

        def sleep(seconds: float) -> None:
            nonlocal looks
            looks += 1
            if names:
                send(harness, front_end, names.pop(0))

        stand_in = SimpleNamespace(sleep=sleep, perf_counter_ns=time.perf_counter_ns)
        monkeypatch.setattr(actor_module, "time", stand_in)
        send(harness, front_end, "first")
        return harness.pass_(wait_ms), looks

    return run


def test_those_who_were_answered_together_begin_together(begin: Begin) -> None:
    """Their next requests are read in one step, the first of them waits for the others and no longer."""
    report, looks = begin(ended=4, coming=3)
    assert (report.commands, report.admitted, looks) == (4, 4, 3)


def test_those_who_do_not_come_again_are_not_waited_for_long(begin: Begin) -> None:
    """The first begins alone after some milliseconds."""
    report, looks = begin(ended=4, coming=0)
    assert (report.admitted, looks) == (1, LOOKS_MAX)


def test_one_that_comes_later_is_not_kept(begin: Begin) -> None:
    """It has nothing to do with those who were answered before."""
    report, looks = begin(ended=4, coming=0, later_s=2 * AGAIN_S)
    assert (report.admitted, looks) == (1, 0)


def test_one_user_alone_is_not_kept(begin: Begin) -> None:
    """Who was answered alone asks alone."""
    report, looks = begin(ended=1, coming=0)
    assert (report.admitted, looks) == (1, 0)


@pytest.mark.parametrize(
    ("ended", "later_s", "step_s", "expected"),
    [(1, 0.0, None, 0), (1, 2 * AGAIN_S, None, 1), (2, 0.0, None, 1), (1, 0.0, 0.3, 1)],
)
def test_the_next_request_of_one_program_wakes_an_encoder_at_once(
    begin: Begin, ended: int, later_s: float, step_s: float | None, expected: int
) -> None:
    """Others may be the first of a burst: an idle worker looks once for the rest."""
    report, looks = begin(ended=ended, coming=0, later_s=later_s, step_s=step_s, wait_ms=1)
    assert (report.admitted, looks) == (1, expected)


def test_where_steps_are_short_there_is_no_waiting(begin: Begin) -> None:
    """It would take longer than what it saves; nor where nothing is known yet."""
    assert begin(ended=4, coming=0, step_s=None)[1] == 0
    delay = BatchingDelay()
    assert delay.looks_max(LOOK_S) == 0
    assert delay.looks_max(None) == 0
    assert delay.looks_max(10.0) == LOOKS_MAX


def test_while_they_come_there_is_another_look() -> None:
    """A bunch that came with the first look may have a second part; one that came alone has none."""
    delay = BatchingDelay()
    assert delay.expects_more(2, 2, now_s=0.0)
    assert not delay.expects_more(2, 0, now_s=0.0)
    assert not delay.expects_more(1, 1, now_s=0.0)
