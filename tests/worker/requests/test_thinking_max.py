"""A bound on reasoning from the client library to the worker: kept across kills and preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.support.workers import WorkerProcess
from tests.worker.harness import Harness, row_of
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.grammar.thinking import thinking_bound
from zmqengine.engine.interface import RowRequest
from zmqengine.errors import BadRequest
from zmqengine.protocol.messages import Constraint, ThinkingMax
from zmqengine.testing import FakeWorker
from zmqengine_client import Client, TokenStream

OPENED = ThinkingMax(10, [700, 701], then=[702], opened=True)


def expected(seed: int, bound: ThinkingMax) -> list[int]:
    thinking = thinking_bound(bound.tokens, bound.closer, then=bound.then, opened=bound.opened)
    row = RowRequest(0, [5, 6], 40, seed=seed, stop_token_ids=frozenset({0}), thinking=thinking)
    return expected_tokens(row)


@pytest.mark.process
def test_the_bound_holds_across_kills_of_a_worker() -> None:
    """Killed before, within and behind the closer; the front-end's `emitted` says how far the reasoning was."""
    config = FakeEngineConfig(step_ms=3)
    restarts = {"restarts_max": 50, "restart_wait_ms": 1, "restart_wait_max_ms": 1}
    with WorkerProcess(config, **restarts) as worker, worker.client() as client:
        for seed, moment in enumerate((3, 9, 10, 11, 12, 13, 20)):
            resumed = 0
            # On a busy machine one of them may be over before the kill.
            while not resumed:
                stream = client.generate_tokens([5, 6], max_tokens=40, seed=seed, thinking_max=OPENED)
                tokens: list[int] = []
                while len(tokens) < moment:
                    tokens += next(stream).tokens
                worker.kill_engine()
                for chunk in stream:
                    tokens += chunk.tokens
                assert tokens == stream.result.tokens == expected(seed, OPENED)
                assert tokens[10:13] == [700, 701, 702]
                resumed = stream.result.resumed


def test_rows_that_are_preempted_within_their_reasoning_keep_their_count(
    make_harness: Callable[..., Harness],
) -> None:
    """Sixteen rows for which memory runs short: parked at any place, each closes its reasoning at the bound."""
    engine = FakeEngineConfig(
        kv_bytes_token=147_000, context_tokens=262_144, rows_max=32, prefill_chunk=8192, eos_index=1500
    )
    harness = make_harness(engine, memory_limit_bytes=16 << 30)
    rows = []
    for number, front_end in enumerate([harness.front_end() for _ in range(16)]):
        bound = ThinkingMax(200 + 40 * number, [700, 701], then=[702], opened=True)
        insert = front_end.insert_message("r", [number + 1] * 6000, max_tokens=None, thinking_max=bound)
        front_end.send(insert)
        rows.append((front_end, insert))
    harness.read_commands(16)
    harness.run_until(
        lambda: all(front_end.read() or "r" in front_end.ends for front_end, _ in rows), passes_max=20_000
    )
    assert harness.actor.counters.parked > 0
    for front_end, insert in rows:
        assert insert.thinking_max is not None
        thinking = thinking_bound(**msgspec.structs.asdict(insert.thinking_max))
        tokens = front_end.tokens["r"]
        assert tokens == expected_tokens(replace(row_of(insert), thinking=thinking), engine)
        place = insert.thinking_max.tokens
        assert tokens[place : place + 3] == [700, 701, 702]


def test_a_bound_that_is_malformed_is_refused_by_name() -> None:
    """By the client before anything is sent, and by the worker where ids are outside its vocabulary."""
    with FakeWorker() as worker, Client(worker.address) as client:
        for bound, named in (
            (ThinkingMax(1, []), "closer"),
            (ThinkingMax(-1, [5]), "tokens"),
            (ThinkingMax(1, [5] * 17), "closer"),
            (ThinkingMax(1, [5], [1000]), "thinking_max: token id 1000"),
        ):
            stream = client.generate_tokens([5], max_tokens=5, thinking_max=bound)
            with pytest.raises(BadRequest, match=named):
                stream.read()


@pytest.fixture(scope="module")
def pico() -> Iterator[WorkerProcess]:
    with WorkerProcess(
        None, model="pico", restarts_max=50, restart_wait_ms=1, restart_wait_max_ms=1
    ) as worker:
        worker.wait_ready()
        yield worker


@pytest.mark.process
def test_a_real_worker_keeps_bounds_and_formats_behind_them_across_kills(pico: WorkerProcess) -> None:
    """Markers that are no special tokens, found by their text; the constraint begins behind the closer."""
    with pico.client() as client:
        tokenizer = client.tokenizer()
        encode = tokenizer.encode
        closer = encode("</think>", False)
        bound = ThinkingMax(12, closer, encode("<think>", False), opened=True)
        digits = Constraint("regex", "[0-9]{4}", after=closer)
        asked = [
            (encode(f"Tell me about {name}."), constraint)
            for name in ("Tom", "Lily")
            for constraint in (None, digits)
        ]

        def start() -> list[TokenStream]:
            return [
                client.generate_tokens(
                    prompt, max_tokens=60, seed=3, temperature=0.9, thinking_max=bound, constraint=constraint
                )
                for prompt, constraint in asked
            ]

        wanted = [stream.read().tokens for stream in start()]
        for tokens, (_, constraint) in zip(wanted, asked, strict=True):
            assert tokens[12 : 12 + len(closer)] == closer
            if constraint is not None:
                assert tokenizer.decode(tokens[12 + len(closer) :]).isdigit()
        for moment in (2, 12, 14, 19):
            streams = start()
            first: list[int] = []
            while len(first) < moment:
                first += next(streams[0]).tokens
            pico.kill_engine()
            rest = [token for chunk in streams[0] for token in chunk.tokens]
            assert first + rest == wanted[0]
            assert [stream.read().tokens for stream in streams[1:]] == wanted[1:]
