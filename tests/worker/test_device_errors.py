"""Failures of the device, as MLX words them, through the real loop: no request is ended for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.support.workers import WorkerProcess
from tests.worker.harness import Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, FakeFault, expected_tokens
from zmqengine.engine.host.device_errors import DEVICE_ERRORS, ONCE_S, UNKNOWN_CUDA, device_error
from zmqengine.engine.interface import RowRequest
from zmqengine.worker.actor import EngineBroken

Make = Callable[..., Harness]

_METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = _METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
TOO_LARGE = (
    "[metal::malloc] Attempting to allocate 21474836480 bytes which is greater than the maximum allowed buffer size of "
    "17179869184 bytes."
)
REPEATED = {
    "metal interactivity": _METAL
    + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "metal memory": _METAL + "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "metal buffers": "[metal::malloc] Resource limit (499000) exceeded.",
    "malloc": "[malloc] Unable to allocate 1073741824 bytes.",
    "cuda memory": "cudaMallocAsync(&buf->data, size, stream) failed: out of memory",
    "python": "MemoryError",
    "host memory": "std::bad_alloc",
}
ENDED = {
    "metal hang": _METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
    "metal ignored": _METAL
    + "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
    "metal victim": _METAL
    + "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
    "metal page fault": _METAL
    + "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)",
    "metal resource": _METAL + "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)",
    "metal of a later macOS": _METAL + "Some Error (00000063:kIOGPUCommandBufferCallbackErrorOfLater)",
    "cuda address": "cudaStreamSynchronize(stream) failed: an illegal memory access was encountered",
    "cuda alignment": "cudaEventSynchronize(event) failed: misaligned address",
    "cuda instruction": "cudaGraphLaunch(graph, stream) failed: an illegal instruction was encountered",
    "cuda launch": "cudaGraphLaunch(graph, stream) failed: unspecified launch failure",
    "cuda watchdog": "cudaStreamSynchronize(stream) failed: the launch timed out and was terminated",
    "cuda assertion": "cudaStreamSynchronize(stream) failed: device-side assert triggered",
    "cuda of a later release": "cudaStreamSynchronize(stream) failed: a fault that nobody knows",
    "cublas": "cublasLtMatmul(handle, desc, a, b) failed: CUBLAS_STATUS_EXECUTION_FAILED",
    "cuda ecc": "cudaStreamSynchronize(stream) failed: uncorrectable ECC error encountered",
}
BLAMED = (
    "shapes do not fit",
    "cudaGraphLaunch(graph, stream) failed: too many resources requested for launch",
)


def test_every_row_of_the_table_is_tried_here() -> None:
    """And each text is of one row."""
    texts = [*REPEATED.values(), *ENDED.values(), TIMEOUT, TOO_LARGE]
    rows = [device_error(RuntimeError(text)) for text in texts]
    assert set(rows) == {*DEVICE_ERRORS, UNKNOWN_CUDA}
    remedies = ["repeat"] * len(REPEATED) + ["exit"] * len(ENDED) + ["once", "shrink"]
    assert [row and row.remedy for row in rows] == remedies
    assert device_error(MemoryError()) is not None
    assert [device_error(RuntimeError(text)) for text in BLAMED] == [None] * len(BLAMED)


@pytest.mark.parametrize("text", REPEATED.values(), ids=REPEATED)
def test_a_lack_of_time_or_memory_is_repeated_in_smaller_chunks(make_harness: Make, text: str) -> None:
    """Four times in a row, which would convict any row: all make the tokens that they would have made."""
    faults = tuple(
        FakeFault(place="next", action="raise", index=step, message=text) for step in (6, 7, 8, 30)
    )
    harness = make_harness(FakeEngineConfig(prefill_chunk=64, prompt_cache_bytes=1 << 20, faults=faults))
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1] * 40, max_tokens=60) for i in range(4)]
    for insert in inserts:
        front_end.send(insert)
    front_end.wait_for_end(*(insert.request for insert in inserts))
    assert harness.actor.counters.engine_failures == 4
    for insert in inserts:
        assert front_end.ends[insert.request][0].finish == "length"
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))
    methods = [call.method for call in harness.engine.calls]
    # The caches are given back first.
    assert methods.count("reset") == methods.count("shrink_chunk") == 4
    assert harness.engine.shrink_chunk() == 64 >> 5


@pytest.mark.parametrize("text", ENDED.values(), ids=ENDED)
def test_a_device_that_is_lost_ends_the_process_at_once(make_harness: Make, text: str) -> None:
    """No request is answered: their streams go on in the next process."""
    fault = FakeFault(place="next", action="raise", index=6, message=text)
    harness = make_harness(FakeEngineConfig(faults=(fault,)))
    front_end = harness.front_end()
    for index in range(3):
        front_end.send(front_end.insert_message(f"r{index}", max_tokens=50))
    with pytest.raises(EngineBroken, match="the device failed"):
        harness.run_until(lambda: False)
    front_end.read()
    assert front_end.ends == {}
    assert "reset" not in {call.method for call in harness.engine.calls}


def test_a_device_that_stays_without_memory_ends_the_process(make_harness: Make) -> None:
    """The bound on failures holds, and nobody is found guilty."""
    fault = FakeFault(place="next", action="raise", times=None, message=REPEATED["cuda memory"])
    harness = make_harness(FakeEngineConfig(faults=(fault,)), engine_failures_max=5)
    front_end = harness.front_end()
    front_end.send(front_end.insert_message("r", max_tokens=50))
    with pytest.raises(EngineBroken, match="6 engine failures"):
        harness.run_until(lambda: False)
    assert front_end.ends == {}


@pytest.mark.parametrize(("seconds", "lives"), [(ONCE_S - 1, False), (ONCE_S + 1, True)])
def test_the_second_timeout_within_a_minute_ends_the_process(
    make_harness: Make, seconds: float, lives: bool
) -> None:
    """omlx #3706: after the third macOS ignores what the process submits. The first is repeated."""
    faults = tuple(FakeFault(place="next", action="raise", index=step, message=TIMEOUT) for step in (6, 20))
    harness = make_harness(FakeEngineConfig(faults=faults), lease_ms=86_400_000)
    front_end = harness.front_end()
    insert = front_end.insert_message("r", max_tokens=50)
    front_end.send(insert)
    harness.run_until(lambda: harness.actor.counters.engine_failures == 1)
    harness.clock.advance(seconds)
    if lives:
        front_end.wait_for_end("r")
        assert front_end.tokens["r"] == expected_tokens(row_of(insert))
        return
    with pytest.raises(EngineBroken, match="the device failed"):
        harness.run_until(lambda: False)
    front_end.read()
    assert front_end.ends == {}


def test_a_timeout_without_a_running_row_does_nothing(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends nobody's prompt cache: macOS 27 has such while the GPU is nearly idle."""
    harness = make_harness()
    front_end = harness.front_end()
    front_end.accepted("a", max_tokens=500)
    harness.run_until(lambda: harness.actor.scheduler.running)
    (running,) = harness.actor.scheduler.running.values()
    harness.actor.lifecycle.end(running, "abort")
    remove, calls = harness.engine.remove, [0]

    def times_out(rows: Iterable[int]) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError(TIMEOUT)
        remove(rows)

    monkeypatch.setattr(harness.engine, "remove", times_out)
    for _ in range(3):
        harness.actor.run_pass(0)
    assert calls[0] == 2
    assert {"reset", "shrink_chunk"}.isdisjoint(call.method for call in harness.engine.calls)
    front_end.accepted("b", max_tokens=5)
    front_end.wait_for_end("b")


def only_the_bad_row_ends_early(harness: Harness) -> None:
    """Three rows end whole beside a row with token 666, which ends with an error."""
    front_end = harness.front_end()
    inserts = [front_end.insert_message(f"r{i}", [i + 1], max_tokens=60) for i in range(3)]
    for insert in (*inserts, front_end.insert_message("bad", [666, 1], max_tokens=60)):
        front_end.send(insert)
    front_end.wait_for_end("bad", *(insert.request for insert in inserts))
    assert front_end.ends["bad"][0].finish == "error"
    for insert in inserts:
        assert front_end.tokens[insert.request] == expected_tokens(row_of(insert))


def test_a_buffer_that_is_too_large_is_a_rows_fault_when_chunks_are_smallest(make_harness: Make) -> None:
    """Smaller chunks need smaller buffers; a row for which the smallest chunk does not help is ended alone."""
    faults = (FakeFault(place="next", action="raise", token=666, times=None, message=TOO_LARGE),)
    harness = make_harness(FakeEngineConfig(prefill_chunk=8, faults=faults), engine_failures_max=20)
    only_the_bad_row_ends_early(harness)
    assert harness.engine.shrink_chunk() == 1


def test_a_guilty_row_is_still_found_beside_failures_of_the_device(make_harness: Make) -> None:
    """A device error while a suspect is on probation neither clears nor convicts it."""
    faults = (
        FakeFault(place="next", action="raise", index=9, message=TIMEOUT),
        FakeFault(place="next", action="raise", token=666, times=None),
    )
    harness = make_harness(FakeEngineConfig(faults=faults), engine_failures_max=9)
    only_the_bad_row_ends_early(harness)


@pytest.mark.parametrize("name", ["metal interactivity", "metal hang"])
def test_a_device_that_fails_while_it_is_kept_warm(
    make_harness: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A product that was for speed alone is no reason to load the model again; a device that is lost is."""
    harness = make_harness(lease_ms=86_400_000)
    harness.engine.lowers_clock = True
    front_end = harness.front_end()
    front_end.accepted("a", max_tokens=5)
    front_end.wait_for_end("a")

    def fails() -> bool:
        raise RuntimeError({**REPEATED, **ENDED}[name])

    monkeypatch.setattr(harness.engine, "keep_warm", fails)
    harness.clock.advance(1.0)
    if name == "metal hang":
        with pytest.raises(EngineBroken, match="the device failed"):
            harness.passes(2)
        return
    harness.passes(2)
    front_end.accepted("b", max_tokens=5)
    assert front_end.wait_for_end("b")[0].finish == "length"


def test_streams_resume_after_a_lost_device() -> None:
    """The supervisor starts the next process; every token comes once."""
    fault = FakeFault(place="next", action="raise", index=150, message=ENDED["cuda address"])
    with WorkerProcess(FakeEngineConfig(step_ms=1.0, faults=(fault,))) as worker, worker.client() as client:
        requests = [RowRequest(row, [row + 1, 5], 200, seed=row) for row in range(4)]
        streams = [
            client.generate_tokens(request.prompt, max_tokens=200, seed=request.seed) for request in requests
        ]
        for request, stream in zip(requests, streams, strict=True):
            assert stream.read().tokens == expected_tokens(request)
        assert client.counters.worker_restarts == 1
        assert "device=illegal address" in worker.log
