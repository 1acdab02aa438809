"""Finding the row that makes steps fail, without real steps."""

from __future__ import annotations

from typing import Any

from zmqengine.worker.scheduler.recovery import STRIKES_MAX, Recovery


def requests(count: int) -> list[Any]:
    """Recovery only asks which is which."""
    return [object() for _ in range(count)]


def join(recovery: Recovery) -> Any:
    """Whoever is named joins; None when nobody is."""
    request = recovery.next_to_join()
    if request is not None:
        recovery.joined(request)
    return request


def test_suspects_join_one_at_a_time_and_only_after_the_one_before_made_a_token() -> None:
    """A suspect on probation is alone with those that are cleared."""
    recovery = Recovery(failures_max=9, window_s=60)
    a, b = requests(2)
    assert not recovery.is_active
    assert recovery.failed([a, b], 0.0) == []
    assert recovery.is_active
    assert join(recovery) is a
    assert join(recovery) is None
    recovery.made_token(a)
    assert join(recovery) is b
    recovery.made_token(b)
    assert join(recovery) is None
    assert not recovery.is_active


def test_the_one_on_probation_is_guilty_and_the_cleared_go_back_together() -> None:
    """Two failures find a poisoned row among any number; those that still wait outside the engine join once each."""
    recovery = Recovery(failures_max=9, window_s=60)
    a, b, bad, c = requests(4)
    recovery.failed([a, b, bad, c], 0.0)
    for innocent in (a, b):
        assert join(recovery) is innocent
        recovery.made_token(innocent)
    assert join(recovery) is bad
    # What the batch really hands over: the rows in the engine. c is not among them.
    assert recovery.failed([a, b, bad], 1.0) == [bad]
    recovery.discard(bad)
    assert [join(recovery), join(recovery), join(recovery)] == [a, b, c]
    recovery.made_token(c)
    assert join(recovery) is None
    assert not recovery.is_active
    # The failures were the bad one's: nothing is held against the others.
    for _ in range(STRIKES_MAX - 1):
        assert recovery.failed([a, b, c], 2.0) == []
        while (request := join(recovery)) is not None:
            recovery.made_token(request)


def test_a_row_that_only_fails_later_is_ended_after_its_strikes() -> None:
    """A failure that probation does not show is bounded all the same."""
    recovery = Recovery(failures_max=9, window_s=60)
    (late,) = requests(1)
    for _ in range(STRIKES_MAX - 1):
        assert recovery.failed([late], 0.0) == []
        assert join(recovery) is late
        recovery.made_token(late)
    assert recovery.failed([late], 0.0) == [late]


def test_a_suspect_that_ends_meanwhile_is_forgotten() -> None:
    """An abort or a deadline during recovery does not block the others."""
    recovery = Recovery(failures_max=9, window_s=60)
    a, b = requests(2)
    recovery.failed([a, b], 0.0)
    assert join(recovery) is a
    recovery.discard(a)
    assert recovery.next_to_join() is b
    recovery.discard(b)  # type: ignore[arg-type]
    assert not recovery.is_active


def test_a_suspect_that_is_parked_on_probation_is_tried_again() -> None:
    """It has shown nothing yet; nobody waits for it in vain."""
    recovery = Recovery(failures_max=9, window_s=60)
    a, b = requests(2)
    recovery.failed([a, b], 0.0)
    assert join(recovery) is a
    assert recovery.preempted(a)
    assert not recovery.preempted(b)
    assert join(recovery) is a
    recovery.made_token(a)
    assert join(recovery) is b


def test_only_failures_within_the_window_count() -> None:
    """A failure a day is no reason to stop; many in a minute are."""
    recovery = Recovery(failures_max=2, window_s=60)
    for when in (0.0, 100.0, 200.0, 300.0):
        recovery.failed([], when)
        assert not recovery.has_failed_too_often
    recovery.failed([], 301.0)
    recovery.failed([], 302.0)
    assert recovery.has_failed_too_often


def test_strikes_expire_with_the_window() -> None:
    """A stream that runs for days is not ended for three failures in three days."""
    recovery = Recovery(failures_max=9, window_s=60)
    (long_lived,) = requests(1)
    for when in (0.0, 100.0, 200.0, 300.0):
        assert recovery.failed([long_lived], when) == []
        assert join(recovery) is long_lived
        recovery.made_token(long_lived)


def test_strikes_of_long_ago_are_not_held_against_who_was_not_in_the_engine_since() -> None:
    """A row that is parked while a failure comes after a long time has not kept those before it."""
    recovery = Recovery(failures_max=9, window_s=60)
    parked, other = requests(2)
    for _ in range(STRIKES_MAX - 1):
        assert recovery.failed([parked], 0.0) == []
        assert join(recovery) is parked
        recovery.made_token(parked)
    assert recovery.failed([other], 61.0) == []
    assert join(recovery) is other
    recovery.made_token(other)
    assert recovery.failed([parked, other], 62.0) == []


def test_an_explained_failure_is_not_held_against_a_row_that_is_parked_meanwhile() -> None:
    """Who was in the failed step is no suspect any more when the guilty one is found, wherever it is by then."""
    recovery = Recovery(failures_max=9, window_s=60)
    parked, bad = requests(2)
    for _ in range(STRIKES_MAX):
        assert recovery.failed([parked, bad], 0.0) == []
        assert join(recovery) is parked
        recovery.made_token(parked)
        assert not recovery.preempted(parked)
        assert join(recovery) is bad
        assert recovery.failed([bad], 0.0) == [bad]
        recovery.discard(bad)
    assert recovery.failed([parked], 0.0) == []
