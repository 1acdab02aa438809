"""The core against a network that loses, repeats and reorders, and a worker that dies at any moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.client.core.cores import expected, image, request, session
from tests.client.core.scripted_worker import Network, ScriptedWorker
from zmqengine.errors import ImageWanted, WorkerLost
from zmqengine_client.core.phases import Phase

STEPS_MAX = 20_000


def run_to_the_end(network: Network, requests: list) -> int:  # type: ignore[type-arg]
    """Steps until all requests have ended; fails if they never do."""
    for step in range(STEPS_MAX):
        if all(one.ended for one in requests):
            return step
        network.step()
    raise AssertionError(f"not ended: {[one.id for one in requests if not one.ended]}")


def check(network: Network, requests: list) -> None:  # type: ignore[type-arg]
    """Every request got exactly its tokens, and the worker was told to forget them all."""
    for one in requests:
        assert one.error is None, one.error
        assert one.tokens == expected(one)
        assert one.end.finish == ("stop" if one.tokens[-1] == 0 else "length")
    for _ in range(600):
        network.step()
        network.wait(0.02)
    assert network.worker is not None
    # A connection that breaks after the last end is not made again: the worker's grace period clears up then.
    if network.session.connection.phase is not Phase.IDLE:
        assert network.worker.requests() == {}


@given(st.integers(0, 2**32))
def test_nothing_is_lost_or_repeated_when_frames_are(seed: int) -> None:
    """With 10 % of the frames dropped, 10 % repeated, and cmd and out overtaking each other, output is exact."""
    network = Network(session(), ScriptedWorker(), seed=seed, drop=0.1, repeat=0.1)
    requests = [request(f"r{number}", [5, number], max_tokens=40) for number in range(4)]
    for one in requests:
        network.session.start_request(one, network.now)
    run_to_the_end(network, requests)
    check(network, requests)


def test_the_lossy_network_loses_frames() -> None:
    """The test above means something: frames were dropped and gaps were found."""
    network = Network(session(), ScriptedWorker(), seed=1, drop=0.1, repeat=0.1)
    requests = [request(f"r{number}", [5, number], max_tokens=100, ignore_eos=True) for number in range(4)]
    for one in requests:
        network.session.start_request(one, network.now)
    run_to_the_end(network, requests)
    counters = network.session.outbox.counters
    assert network.dropped > 0
    assert counters.gaps > 0
    assert counters.frames_lost > 0
    assert counters.duplicate_tokens > 0


@given(st.integers(0, 2**32), st.integers(0, 400), st.booleans())
def test_a_worker_that_dies_at_any_step_costs_no_token(seed: int, kill_at: int, notice: bool) -> None:
    """Whichever step the worker dies in, noticed or not, every stream goes on where it was."""
    network = Network(session(), ScriptedWorker(), seed=seed, drop=0.05)
    requests = [request(f"r{number}", [5, number], max_tokens=30) for number in range(3)]
    for one in requests:
        network.session.start_request(one, network.now)
    for _ in range(kill_at):
        network.step()
    network.kill(notice=notice)
    for _ in range(seed % 50):
        network.step()
    network.worker = ScriptedWorker(epoch=2)
    run_to_the_end(network, requests)
    check(network, requests)


@given(st.integers(0, 2**32), st.integers(0, 400), st.integers(2, 4))
@example(2723156, 0, 2)  # A copy of the insert is accepted after the refusal of the first.
def test_images_are_sent_again_whenever_the_worker_lacks_them(seed: int, kill_at: int, room: int) -> None:
    """Its death at any step and a store that is smaller than all images cost no token, and no pixel is wrong."""
    network = Network(session(), ScriptedWorker(), seed=seed, drop=0.05)
    shared = image(b"shared")
    requests = [
        request(
            f"r{number}", [5, number, 6], max_tokens=20,
            images=[shared, image(b"%d" % number, 2, fresh=number > 0)],
        )
        for number in range(3)
    ]  # fmt: skip
    network.worker.images_room = room
    for one in requests:
        network.session.start_request(one, network.now)
    for _ in range(kill_at):
        network.step()
    network.kill()
    network.worker = ScriptedWorker(epoch=2)
    network.worker.images_room = room
    run_to_the_end(network, requests)
    for one in requests:
        if one.error is None:
            assert one.tokens == expected(one)
        else:
            assert isinstance(one.error, ImageWanted)
    for pixels in network.worker.images.values():
        assert pixels in (b"shared", b"0", b"1", b"2")
    check(network, [one for one in requests if one.error is None])


def open_by_steps(network: Network, steps: int) -> None:
    """The first so many steps of the way from describe to the first token, in their usual order."""
    way: list[Callable[[], None]] = [
        lambda: network.serve("ctl"),
        lambda: network.deliver("ctl"),
        lambda: network.serve("cmd"),
        lambda: network.deliver("cmd"),
        network.grant,
        lambda: network.deliver("out"),
        lambda: network.serve("cmd"),
        lambda: network.deliver("cmd"),
        network.run_pass,
        lambda: network.deliver("out"),
    ]
    for step in way[:steps]:
        network.carry_out()
        step()
    network.carry_out()


@pytest.mark.parametrize("killed_at", range(1, 11))
def test_a_worker_that_dies_while_a_session_is_opened_may_stay_away_for_long(killed_at: int) -> None:
    """Killed after any step of the opening and away for 30 s: longer than the answer and the connect timeout.

    Every such death is told as `lost`, once, and stale news of the old connection does no harm to the new one.
    """
    network = Network(session(), ScriptedWorker())
    one = request(max_tokens=30)
    network.session.start_request(one, network.now)
    open_by_steps(network, killed_at)
    network.session.outbox.take_events()
    network.kill()
    assert [event.kind for event in network.session.outbox.take_events()] == ["lost"]
    for _ in range(150):
        network.wait(0.2)
    assert one.error is None, one.error
    network.worker = ScriptedWorker(epoch=2)
    network.wait(0.2)
    open_by_steps(network, killed_at)
    network.session.disconnected("cmd", network.now)
    run_to_the_end(network, [one])
    check(network, [one])


def test_a_new_worker_has_its_own_time_to_open_a_session() -> None:
    """The answer timeout does not count while another process was asked, noticed or not."""
    network = Network(session(answer_timeout_s=5.0), ScriptedWorker())
    one = request(max_tokens=5)
    network.session.start_request(one, network.now)
    open_by_steps(network, 2)
    assert network.session.connection.phase is Phase.HELLO
    network.kill(notice=False)
    for _ in range(22):
        network.wait(0.2)
    network.worker = ScriptedWorker(epoch=2)
    for _ in range(4):
        # It answers on ctl and has no time for commands yet.
        network.wait(0.2)
        while network.up["ctl"]:
            network.serve("ctl")
            network.deliver("ctl")
    assert one.error is None, one.error
    run_to_the_end(network, [one])
    check(network, [one])


def test_a_worker_that_died_in_the_opening_and_stays_away_is_given_up() -> None:
    """After `worker_lost_timeout_s`, as any other, and with the reason that holds: there is no worker."""
    network = Network(session(worker_lost_timeout_s=20.0), ScriptedWorker())
    one = request()
    network.session.start_request(one, network.now)
    open_by_steps(network, 3)
    network.kill()
    for _ in range(99):
        network.wait(0.2)
    assert one.error is None, one.error
    network.wait(0.4)
    assert isinstance(one.error, WorkerLost)


@given(st.integers(0, 2**32))
def test_many_deaths_cost_no_token(seed: int) -> None:
    """A worker that dies again and again still delivers every token once."""
    network = Network(session(), ScriptedWorker(), seed=seed, drop=0.05)
    requests = [request(f"r{number}", [5, number], max_tokens=40) for number in range(3)]
    for one in requests:
        network.session.start_request(one, network.now)
    for epoch in range(2, 8):
        for _ in range(network.random.randrange(300)):
            network.step()
        network.kill(notice=network.random.random() < 0.7)
        network.worker = ScriptedWorker(epoch=epoch)
    run_to_the_end(network, requests)
    check(network, requests)
    assert max(one.resumed for one in requests) <= 6


@given(st.integers(0, 2**32), st.integers(0, 400))
def test_a_broken_connection_to_a_living_worker_costs_no_token(seed: int, cut_at: int) -> None:
    """The same worker still holds the requests: they are resumed and not inserted a second time."""
    network = Network(session(), ScriptedWorker(), seed=seed)
    requests = [request(f"r{number}", [5, number], max_tokens=30) for number in range(3)]
    for one in requests:
        network.session.start_request(one, network.now)
    for _ in range(cut_at):
        network.step()
    if network.cmd_open:
        network.session.disconnected("cmd", network.now)
    run_to_the_end(network, requests)
    check(network, requests)
    assert all(one.resumed == 0 for one in requests)


@pytest.mark.parametrize("abort_at", range(0, 120, 3))
def test_an_abort_at_any_step_ends_the_request_once(abort_at: int) -> None:
    """smg #1427 review: an abort between pending and inserted was lost; here it ends in every phase."""
    network = Network(session(), ScriptedWorker(), seed=abort_at)
    one = request(max_tokens=200, ignore_eos=True)
    network.session.start_request(one, network.now)
    for _ in range(abort_at):
        network.step()
    network.session.abort_request(one, network.now)
    run_to_the_end(network, [one])
    assert one.end is not None
    assert one.end.finish == "abort"
    assert one.tokens == expected(one)[: len(one.tokens)]
    for _ in range(600):
        network.step()
        network.wait(0.02)
    assert network.worker is not None
    assert network.worker.requests() == {}
