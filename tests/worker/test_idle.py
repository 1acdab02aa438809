"""The pause between requests, by a fake clock: buffers, the GPU's clock, and the machine's sleep."""

from __future__ import annotations

import pytest

from tests.worker.harness import ARRIVAL_MS_MAX, Harness
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.worker.idle import AWAKE_S, REST_S, WARM_EVERY_S
from zmqengine.worker.process.power import PowerAssertion


class Backend:
    """Stands in for the system's power management."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.calls: list[str] = []

    def take(self) -> None:
        self.calls.append("take")
        if self.refusal:
            raise OSError(self.refusal)

    def drop(self) -> None:
        self.calls.append("drop")


def serve_one(harness: Harness, name: str = "a") -> None:
    front_end = harness.front_end()
    front_end.accepted(name, [1, 2, 3], max_tokens=5)
    front_end.wait_for_end(name)


def calls(harness: Harness, method: str) -> int:
    return [call.method for call in harness.engine.calls].count(method)


def idle(harness: Harness, seconds: float) -> None:
    """Passes as an idle worker makes them: it waits until something is due, 10 s at the most."""
    until_s = harness.clock() + seconds
    while harness.clock() < until_s:
        wait_s = harness.actor._timers.idle_wait_ms() / 1000
        harness.clock.advance(min(wait_s, until_s - harness.clock() + 0.001))
        harness.pass_()


def test_the_gpu_is_kept_warm_for_a_minute_after_the_last_request(make_harness) -> None:
    """omlx #3451: twice a second; buffers stay that long. Afterwards nothing is due."""
    harness: Harness = make_harness(lease_ms=86_400_000)
    harness.engine.lowers_clock = True
    serve_one(harness)
    harness.pass_()
    before = calls(harness, "keep_warm")
    idle(harness, 30)
    assert calls(harness, "keep_warm") - before == pytest.approx(30 / WARM_EVERY_S, abs=2)
    assert harness.released == 0
    idle(harness, 40)
    warmed = calls(harness, "keep_warm")
    assert harness.released == 1
    idle(harness, 2 * AWAKE_S)
    assert calls(harness, "keep_warm") == warmed
    assert harness.actor._timers._idle.next_s() is None


def test_a_gpu_that_another_worker_uses_is_not_kept_warm(make_harness) -> None:
    """omlx #3706: small work beside a busy process has timed out; and that process keeps it warm."""
    harness: Harness = make_harness(lease_ms=86_400_000)
    harness.engine.lowers_clock = True
    serve_one(harness)
    harness.pass_()
    harness.actor.batch.share_device(2)
    before = calls(harness, "keep_warm")
    idle(harness, 10)
    assert calls(harness, "keep_warm") == before
    harness.actor.batch.share_device(0)
    idle(harness, 10)
    assert calls(harness, "keep_warm") - before == pytest.approx(10 / WARM_EVERY_S, abs=2)


@pytest.mark.parametrize(("lowers_clock", "gpu_warm_s", "asked"), [(False, 60.0, 1), (True, 0.0, 0)])
def test_other_devices_rest_after_a_few_seconds(
    make_harness, lowers_clock: bool, gpu_warm_s: float, asked: int
) -> None:
    """CUDA and the CPU gain nothing; and it is an option."""
    harness: Harness = make_harness(lease_ms=86_400_000, gpu_warm_s=gpu_warm_s)
    harness.engine.lowers_clock = lowers_clock
    serve_one(harness)
    idle(harness, REST_S + 1)
    assert calls(harness, "keep_warm") == asked
    assert harness.released == 1


def test_a_request_in_the_pause_begins_it_anew(make_harness) -> None:
    """Nothing is given back between the turns of a conversation."""
    harness: Harness = make_harness(lease_ms=86_400_000)
    harness.engine.lowers_clock = True
    for turn in range(5):
        serve_one(harness, f"turn{turn}")
        idle(harness, 40)
    assert harness.released == 0


class Wired:
    """Wired memory that notes what it was told."""

    def __init__(self, backend: Backend) -> None:
        self._calls = backend.calls

    def wire(self) -> None:
        self._calls.append("wire")

    def unwire(self) -> None:
        self._calls.append("unwire")


def test_nothing_is_wired_while_the_machine_may_sleep(make_harness) -> None:
    """omlx #978: macOS panicked after it woke with wired weights. They are wired again for the next request."""
    backend = Backend()
    power = PowerAssertion(backend)
    harness: Harness = make_harness(power=power, wired=Wired(backend), lease_ms=86_400_000)
    serve_one(harness)
    idle(harness, AWAKE_S - 5)
    assert backend.calls == ["take", "wire"]
    idle(harness, 10)
    assert backend.calls == ["take", "wire", "unwire", "drop"]
    serve_one(harness, "b")
    assert backend.calls == ["take", "wire", "unwire", "drop", "take", "wire"]


def test_a_machine_that_slept_in_spite_of_all_wires_nothing_until_the_next_request(make_harness) -> None:
    """A closed lid asks nobody."""
    backend = Backend()
    harness: Harness = make_harness(wired=Wired(backend), lease_ms=86_400_000)
    serve_one(harness)
    harness.pass_()
    assert backend.calls == ["wire"]
    harness.asleep_s += 3600
    harness.pass_()
    assert backend.calls == ["wire", "unwire"]
    serve_one(harness, "b")
    assert backend.calls == ["wire", "unwire", "wire"]


def test_the_machine_stays_awake_while_requests_run_and_a_minute_longer(make_harness) -> None:
    """omlx #1081: a Mac fell asleep while it generated. One assertion a conversation, told in `status`."""
    backend = Backend()
    harness: Harness = make_harness(power=PowerAssertion(backend), lease_ms=86_400_000)
    harness.pass_()
    assert backend.calls == []
    for turn in range(3):
        serve_one(harness, f"turn{turn}")
        assert harness.shared_status.facts["power_assertion"] == "held"
        idle(harness, AWAKE_S / 2)
    assert backend.calls == ["take"]
    idle(harness, AWAKE_S)
    assert backend.calls == ["take", "drop"]
    assert harness.shared_status.facts["power_assertion"] == "released"
    idle(harness, 2 * AWAKE_S)
    serve_one(harness, "again")
    assert backend.calls == ["take", "drop", "take"]


def test_a_system_that_refuses_is_asked_once(make_harness, caplog: pytest.LogCaptureFixture) -> None:
    """Requests run all the same."""
    backend = Backend("not allowed")
    harness: Harness = make_harness(power=PowerAssertion(backend), lease_ms=86_400_000)
    for turn in range(3):
        serve_one(harness, f"turn{turn}")
        idle(harness, 2 * AWAKE_S)
    assert backend.calls == ["take"]
    assert harness.shared_status.facts["power_assertion"] == "refused: not allowed"
    assert caplog.text.count("the machine may sleep") == 1


@pytest.mark.parametrize("where", ["waiting", "in a step"])
def test_no_lease_ends_because_the_worker_stood_still(
    make_harness, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Stopped for an hour, idle or in the middle of a step: nobody could be heard in that time, and streams go on."""
    harness: Harness = make_harness(lease_ms=60_000)
    front_end = harness.front_end()
    if where == "waiting":
        monkeypatch.setattr(harness.actor._poller, "poll", lambda wait_ms: harness.clock.advance(3600) or [])
        harness.pass_(wait_ms=10_000)
        harness.pass_()
        front_end.accepted("a", [1, 2, 3], max_tokens=5)
    else:
        front_end.accepted("a", [1, 2, 3], max_tokens=5)
        step = harness.engine.next

        def stopped():
            monkeypatch.setattr(harness.engine, "next", step)
            harness.clock.advance(3600)
            return step()

        monkeypatch.setattr(harness.engine, "next", stopped)
    assert front_end.wait_for_end("a")[0].finish == "length"
    assert len(harness.actor.sessions) == 1
    # The front-end is not there for ever: silence while the worker runs counts.
    idle(harness, 70)
    assert len(harness.actor.sessions) == 0


def test_slow_steps_keep_no_front_end_that_is_gone(make_harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model on a slow machine takes seconds for a step: commands are read between two, so silence counts."""
    harness: Harness = make_harness(
        FakeEngineConfig(context_tokens=10_000), lease_ms=86_400_000, grace_ms=2000
    )
    staying, gone = harness.front_end(), harness.front_end()
    for front_end in (staying, gone):
        front_end.accepted("a", [1, 2, 3], max_tokens=5000)
    step = harness.engine.next

    def slow() -> object:
        harness.clock.advance(3.0)
        return step()

    monkeypatch.setattr(harness.engine, "next", slow)
    harness.passes(2)
    gone.close()
    harness.front_ends.remove(gone)
    assert harness.sockets.out.poll(ARRIVAL_MS_MAX), "its subscription has not ended"
    harness.passes(4)
    assert len(harness.actor.lifecycle.live()) == 1


@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_connection_that_was_lost_meanwhile_may_be_replaced(make_harness, how: str) -> None:
    """Over tcp it breaks when the other side hears nothing, and a new one takes a while: a stream waits a lease."""
    harness: Harness = make_harness(FakeEngineConfig(context_tokens=10_000), lease_ms=60_000, grace_ms=2000)
    front_end = harness.front_end()
    front_end.accepted("a", [1, 2, 3], max_tokens=5000)
    harness.passes(5)
    if how == "stopped":
        harness.actor._timers.stood_still(3600.0, harness.clock())
    else:
        # The clock of leases stands still in sleep.
        harness.asleep_s = 3600.0
        harness.pass_()
    front_end.close()
    harness.front_ends.remove(front_end)
    harness.run_until(lambda: [session.subscribers for session in harness.actor.sessions] == [0])
    for _ in range(40):
        harness.clock.advance(1.0)
        harness.pass_()
    again = harness.front_end(secret=front_end.secret, expects_gaps=True)
    assert len(harness.actor.lifecycle.live()) == 1
    again.close()
    harness.front_ends.remove(again)
    harness.run_until(lambda: [session.subscribers for session in harness.actor.sessions] == [0])
    harness.clock.advance(61.0)
    harness.pass_()
    harness.pass_()
    assert len(harness.actor.sessions) == 0


def test_the_heap_is_trimmed_once_buffers_are_released(make_harness) -> None:
    """At once, though the last trim of the busy time freed nothing and the next was put off."""
    harness: Harness = make_harness(lease_ms=86_400_000)
    heap, trims = harness.actor._heap, list[int]()
    serve_one(harness)
    heap._trim, heap._least_bytes = lambda pad: trims.append(pad) or 0, -(1 << 40)
    heap._next_s = harness.clock() + 60
    idle(harness, REST_S - 1)
    assert not trims
    idle(harness, 2)
    assert trims == [0]
