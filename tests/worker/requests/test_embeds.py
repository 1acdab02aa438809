"""Embeds in the actor: fair beside generation, whole through preemption, failed steps and slow readers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.worker.harness import FrontEnd, Harness
from zmqengine.engine.fake.fake_engine import FakeEngine, FakeEngineConfig, FakeFault
from zmqengine.engine.fake.fake_vectors import fake_vector
from zmqengine.protocol.messages import Accepted, Rejected, TokenFrame
from zmqengine.worker.wire.outgoing import FRAME_TOKENS_MAX

WIDTH = 24
CONFIG = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=32)
on_both_engines = pytest.mark.parametrize("generates", [True, False])
"""An engine that generates too, and a `VectorEngine`."""


def texts(count: int, first: int = 0) -> list[list[int]]:
    """Texts of 1 to 7 tokens, all different."""
    return [[1 + (first + index) % 900, *range(2, 2 + index % 7)] for index in range(count)]


def expect_whole(front_end: FrontEnd, request: str, given: list[list[int]], width: int = WIDTH) -> None:
    """Each text's own vector is there, once and in order."""
    made = [np.frombuffer(packed, "<f4") for packed in front_end.vectors[request]]
    assert len(made) == len(given)
    for vector, text in zip(made, given, strict=True):
        np.testing.assert_array_equal(vector, fake_vector(text, width))


@on_both_engines
def test_many_texts_come_back_in_order_with_one_end(
    make_harness: Callable[..., Harness], generates: bool
) -> None:
    """Each pass computes a bounded number of tokens, and its vectors go out with it."""
    harness = make_harness(msgspec.structs.replace(CONFIG, generates=generates))
    front_end = harness.front_end()
    given = texts(200)
    front_end.embed("e", given)
    (end,) = front_end.wait_for_end("e")
    expect_whole(front_end, "e", given)
    assert (end.finish, end.prompt_tokens) == ("stop", sum(map(len, given)))
    frames = [output for output in front_end.outputs if isinstance(output, TokenFrame)]
    assert len(frames) >= sum(map(len, given)) / CONFIG.prefill_chunk
    assert not any(frame.progress for frame in frames)
    assert harness.actor.counters.vectors == 200


def test_the_log_tells_vectors_of_an_embed_and_tokens_of_a_chat(
    make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture
) -> None:
    """An embed of three texts makes no token."""
    caplog.set_level("INFO")
    front_end = make_harness(CONFIG).front_end()
    front_end.embed("e", texts(3))
    front_end.accepted("c", max_tokens=5)
    front_end.wait_for_end("e", "c")
    ends = {vars(record)["request"]: vars(record) for record in caplog.records if record.message == "ended"}
    assert (ends["e"]["vectors"], ends["c"]["tokens"]) == (3, 5)
    assert "tokens" not in ends["e"]
    assert "vectors" not in ends["c"]


def test_a_chat_takes_the_row_of_an_embed_which_goes_on_later(make_harness: Callable[..., Harness]) -> None:
    """Embeds are batch work unless they say otherwise: they give their rows up and lose no vector."""
    harness = make_harness(FakeEngine(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, rows_max=2)))
    flood, chat = harness.front_end(), harness.front_end()
    given = {f"e{number}": texts(50, number) for number in range(4)}
    for request, some in given.items():
        flood.embed(request, some)
    harness.run_until(lambda: len(harness.actor.scheduler.running) == 2)
    chat.accepted("c", max_tokens=5)
    assert (
        harness.run_until(lambda: any(row.id == "c" for row in harness.actor.scheduler.running.values())) <= 2
    )
    chat.wait_for_end("c")
    assert harness.actor.counters.parked > 0
    assert len(flood.ends) < 4
    flood.wait_for_end(*given)
    for request, some in given.items():
        expect_whole(flood, request, some)


def test_an_urgent_embed_keeps_its_row(make_harness: Callable[..., Harness]) -> None:
    """A query in a search box says priority 0, and nobody preempts it then."""
    harness = make_harness(FakeEngine(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, rows_max=1)))
    query, chat = harness.front_end(), harness.front_end()
    query.embed("q", texts(20), priority=0)
    harness.run_until(lambda: harness.actor.scheduler.running)
    chat.accepted("c", max_tokens=5)
    query.wait_for_end("q")
    assert harness.actor.counters.parked == 0
    chat.wait_for_end("c")


def test_a_failed_step_costs_no_vector(make_harness: Callable[..., Harness]) -> None:
    """The engine is reset; texts without a vector are computed again, the others are not."""
    faults = (FakeFault(place="next", action="raise", index=2),)
    config = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=16, faults=faults)
    harness = make_harness(config)
    front_end = harness.front_end()
    given = {f"e{number}": texts(30, number) for number in range(3)}
    for request, some in given.items():
        front_end.embed(request, some)
    front_end.accepted("c", max_tokens=9)
    ends = front_end.wait_for_end(*given, "c")
    assert [end.finish for end in ends] == ["stop"] * 3 + ["length"]
    assert harness.actor.counters.engine_failures == 1
    for request, some in given.items():
        expect_whole(front_end, request, some)
    assert harness.actor.counters.vectors == 90


@on_both_engines
def test_an_urgent_embed_takes_the_row_of_another_which_goes_on_later(
    make_harness: Callable[..., Harness], generates: bool
) -> None:
    """No vector is lost or computed twice."""
    config = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, rows_max=1, generates=generates)
    harness = make_harness(config)
    flood, query = harness.front_end(), harness.front_end()
    flood.embed("e", texts(50))
    harness.run_until(lambda: harness.actor.scheduler.running)
    query.embed("q", texts(3, 7), priority=0)
    query.wait_for_end("q")
    assert harness.actor.counters.parked == 1
    assert "e" not in flood.ends
    flood.wait_for_end("e")
    expect_whole(flood, "e", texts(50))
    expect_whole(query, "q", texts(3, 7))
    assert harness.actor.counters.vectors == 53


@pytest.mark.parametrize("message", ["", "[malloc] Unable to allocate 1073741824 bytes."])
def test_a_failed_step_of_an_engine_of_vectors_costs_none(
    make_harness: Callable[..., Harness], message: str
) -> None:
    """Every row has left it then, whatever failed; texts without a vector are computed again."""
    faults = (FakeFault(place="next", action="raise", index=2, message=message),)
    config = FakeEngineConfig(dimensions=WIDTH, prefill_chunk=16, faults=faults, generates=False)
    harness = make_harness(config)
    front_end = harness.front_end()
    given = {f"e{number}": texts(30, number) for number in range(3)}
    for request, some in given.items():
        front_end.embed(request, some)
    assert [end.finish for end in front_end.wait_for_end(*given)] == ["stop"] * 3
    assert harness.actor.counters.engine_failures == 1
    for request, some in given.items():
        expect_whole(front_end, request, some)
    assert harness.actor.counters.vectors == 90


def test_steps_of_an_engine_of_vectors_are_short_beside_rows_of_other_workers(
    make_harness: Callable[..., Harness],
) -> None:
    """It is told with each step how many decode there."""
    harness = make_harness(msgspec.structs.replace(CONFIG, generates=False))
    front_end = harness.front_end()
    for rows in (3, 0):
        harness.actor.batch.share_device(rows)
        front_end.embed(f"e{rows}", texts(9))
        front_end.wait_for_end(f"e{rows}")
        assert harness.engine.rows_elsewhere == rows


@on_both_engines
def test_an_abort_and_a_deadline_end_an_embed_that_runs(
    make_harness: Callable[..., Harness], generates: bool
) -> None:
    """Its row leaves the engine; what it had is sent."""
    harness = make_harness(FakeEngineConfig(dimensions=WIDTH, prefill_chunk=8, generates=generates))
    front_end = harness.front_end()
    front_end.embed("e", texts(200))
    front_end.embed("d", texts(200), deadline_ms=1000)
    harness.run_until(lambda: len(harness.actor.scheduler.running) == 2)
    front_end.abort("e")
    harness.clock.advance(2)
    ends = front_end.wait_for_end("e", "d")
    assert [end.finish for end in ends] == ["abort", "deadline"]
    harness.passes(2)
    assert harness.engine.row_ids == set()
    assert 0 < len(front_end.vectors["e"]) < 200


def test_a_frame_of_wide_vectors_is_bounded(make_harness: Callable[..., Harness]) -> None:
    """A pass that makes 100 vectors of 16 KiB sends several frames, and resume cuts them likewise."""
    width = 4096
    harness = make_harness(FakeEngineConfig(dimensions=width, prefill_chunk=4096))
    front_end = harness.front_end()
    given = texts(200)
    front_end.embed("e", given)
    front_end.wait_for_end("e")
    expect_whole(front_end, "e", given, width)
    frames = [output for output in front_end.outputs if isinstance(output, TokenFrame)]
    counts = [row.count for frame in frames for row in frame.rows]
    assert max(counts) == FRAME_TOKENS_MAX * 16 // width


def test_frames_that_the_vectors_do_not_fill_evenly_are_followed_by_the_rest(
    make_harness: Callable[..., Harness],
) -> None:
    """176 vectors of 1500 floats fit in a frame, and leave some of its budget."""
    width = 1500
    harness = make_harness(FakeEngineConfig(dimensions=width, prefill_chunk=4096))
    front_end = harness.front_end()
    given = texts(250)
    front_end.embed("e", given)
    front_end.wait_for_end("e")
    expect_whole(front_end, "e", given, width)


def test_vectors_that_nobody_acknowledges_are_bounded(make_harness: Callable[..., Harness]) -> None:
    """What an embed will make counts from the beginning, so that a queue of them is no surprise."""
    harness = make_harness(FakeEngineConfig(dimensions=1024, prefill_chunk=1), token_log_bytes_max=1 << 20)
    front_end = harness.front_end()
    replies = [front_end.embed(f"e{number}", texts(100)) for number in range(6)]
    accepted = [isinstance(reply, Accepted) for reply in replies]
    assert accepted == [True] * 3 + [False] * 3
    refused = replies[3]
    assert isinstance(refused, Rejected)
    assert refused.code == "overloaded"
    assert "acknowledge" in refused.message


@pytest.mark.parametrize(
    ("config", "fields", "told"),
    [
        (FakeEngineConfig(name="chatty"), {}, "the model chatty makes no embeddings: it makes text"),
        (FakeEngineConfig(name="ranker", labels=1), {}, "ranker makes no embeddings: it makes scores"),
        (CONFIG, {"output": "score"}, "makes no scores, which need a reranker: it makes embeddings"),
        (CONFIG, {"dimensions": 25}, "dimensions: 25 are more than the 24 of the model fake"),
    ],
)
def test_a_model_that_cannot_refuses_by_name(
    make_harness: Callable[..., Harness], config: FakeEngineConfig, fields: dict[str, object], told: str
) -> None:
    """With the words that say what the model does instead."""
    refused = make_harness(config).front_end().embed("e", [[5]], **fields)
    assert isinstance(refused, Rejected)
    assert (refused.code, told in refused.message) == ("bad_request", True), refused.message


def test_a_text_that_is_too_long_is_refused_with_the_numbers(make_harness: Callable[..., Harness]) -> None:
    """And says which text."""
    refused = (
        make_harness(FakeEngineConfig(dimensions=8, context_tokens=64))
        .front_end()
        .embed("e", [[5], [5] * 65])
    )
    assert isinstance(refused, Rejected)
    assert refused.code == "context_exceeded"
    assert "text 1 has 65 tokens, over the 64" in refused.message


def test_an_embed_reserves_memory_for_its_longest_text(make_harness: Callable[..., Harness]) -> None:
    """A decoder holds the KV cache of one text of it at a time; one that fits in no memory is refused."""
    engine = FakeEngineConfig(dimensions=8, kv_bytes_token=1000, prefill_chunk=4)
    harness = make_harness(engine, memory_limit_bytes=555_556)
    front_end = harness.front_end()
    refused = front_end.embed("never", [[5], [5] * 501])
    assert isinstance(refused, Rejected)
    assert (refused.code, "a text of 501 tokens needs" in refused.message) == ("never_fits", True)
    front_end.embed("e", [[5] * 20, [6] * 100, [7] * 3])
    harness.run_until(lambda: harness.actor.scheduler.running)
    (running,) = harness.actor.scheduler.running.values()
    assert running.reserved_bytes == harness.engine.project_bytes(100)
    front_end.wait_for_end("e")
    harness.run_until(lambda: not harness.actor.scheduler.has_work)
    assert harness.actor.scheduler.memory.reserved_bytes == 0
