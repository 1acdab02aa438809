"""The HTTP client of the load generator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.bench.sse_server import CLOSE, HOLD, SseServer, event
from zmqengine.bench.load.loops import closed_loop
from zmqengine.bench.load.measures import summarise, token_gaps_ms, ttft_ms
from zmqengine.bench.targets.http_connection import HttpConnection, HttpOutcome
from zmqengine.bench.targets.http_target import HttpSession
from zmqengine.bench.targets.records import RequestRecord, RequestSpec
from zmqengine.bench.targets.target import TargetError, TargetSpec
from zmqengine.bench.targets.target_sessions import open_session

REQUEST = RequestSpec(text="once upon a", max_tokens=4)
TIMEOUT_S = 60.0


def session_of(server: SseServer, script: str, **options: Any) -> HttpSession:
    spec = TargetSpec(label="fake", kind="http", address=server.url, model=script)
    return HttpSession(spec, timeout_s=options.get("timeout_s", TIMEOUT_S))


async def ask(
    server: SseServer, script: str, request: RequestSpec = REQUEST, **options: Any
) -> RequestRecord:
    async with server.running():
        session = session_of(server, script, **options)
        outcome = await session.send(request).outcome()
        await session.close()
        return outcome.record(lambda text: server.tokens_per_text.get(text, 1))


class StubTransport:
    """Takes what is written and lets the test play the server."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        pass


def test_arithmetic_is_exact_for_a_server_with_known_delays() -> None:
    """TTFT, gaps and tokens per second, with the clock in the test's hands and a chunk of two tokens."""
    now_s = 100.0

    async def play() -> RequestRecord:
        nonlocal now_s
        connection = HttpConnection(lambda: now_s)
        connection.connection_made(StubTransport())  # type: ignore[arg-type]
        outcome = HttpOutcome(now_s, stream=True)
        ended = connection.exchange(outcome, b"POST", lambda chunks: None)
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        for delay_s, payload in (
            (0.5, {"choices": [{"text": " one"}]}),
            (0.25, {"choices": [{"text": " two three"}]}),
            (0.125, {"choices": [{"text": " four", "finish_reason": "length"}], "usage": usage}),
        ):
            now_s += delay_s
            data = event(payload)
            connection.data_received(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        now_s += 0.125
        connection.data_received(b"0\r\n\r\n")
        await asyncio.wait_for(ended, TIMEOUT_S)
        return outcome.record(lambda text: len(text.split()))

    record = asyncio.run(play())
    assert record.arrivals == [(100.5, 1), (100.75, 2), (100.875, 1)]
    assert ttft_ms(record) == 500.0
    assert token_gaps_ms(record) == [250.0, 0.0, 125.0]
    assert summarise([record])["tokens_per_s"] == 4.0


def test_delays_of_a_real_server_are_seen_and_not_shortened() -> None:
    """Over a real socket no token is earlier than the server made it."""
    server = SseServer({"slow": [0.05, " a", 0.03, " b", " c"]})
    record = asyncio.run(ask(server, "slow"))
    first_ms = ttft_ms(record)
    assert first_ms is not None
    assert first_ms >= 50
    # A first token that a busy machine reads late makes the gap behind it shorter, but nothing earlier.
    assert record.arrivals[1].at_s - record.started_s >= 0.079
    assert max(token_gaps_ms(record)) > 0
    assert (record.tokens, record.prompt_tokens, record.cached_tokens, record.finish) == (3, 3, 2, "length")
    assert record.error == ""


@pytest.mark.parametrize(("keep_alive", "chunked"), [(True, True), (False, True), (False, False)])
def test_every_way_to_end_a_body_is_understood(keep_alive: bool, chunked: bool) -> None:
    """Chunked or up to the end of the connection; a connection is used again only if the server allows it."""

    async def twice(server: SseServer) -> list[RequestRecord]:
        async with server.running():
            session = session_of(server, "plain")
            outcomes = await closed_loop(session, [REQUEST, REQUEST], users=1)
            await session.close()
            return [outcome.record() for outcome in outcomes]

    server = SseServer({"plain": [" a", " b"]}, keep_alive=keep_alive, chunked=chunked)
    records = asyncio.run(twice(server))
    assert [(record.text, record.error) for record in records] == [(" a b", "")] * 2
    assert server.connections == (1 if keep_alive else 2)


def test_several_tokens_in_one_chunk_are_counted_by_the_usage() -> None:
    """A server that gathers tokens is not taken for one that makes fewer."""
    server = SseServer({"grouped": [" a b", " c"]}, tokens_per_text={" a b": 2})
    record = asyncio.run(ask(server, "grouped"))
    assert [arrival.tokens for arrival in record.arrivals] == [2, 1]


def test_a_refusal_is_an_error_with_its_status() -> None:
    """429 has no tokens and tells why."""
    record = asyncio.run(ask(SseServer({}, status=429), "any"))
    assert record.error == 'http 429: {"error": {"message": "too busy"}}'
    assert record.arrivals == []


def test_a_connection_cut_in_mid_stream_is_an_error_with_the_tokens_so_far() -> None:
    """A server that dies is not one that has finished."""
    record = asyncio.run(ask(SseServer({"cut": [" a", 0.01, CLOSE]}), "cut"))
    assert record.error.startswith("connection closed by the server")
    assert record.tokens == 1


def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    """No exception leaves the load generator."""

    async def nobody() -> RequestRecord:
        server = SseServer({})
        async with server.running():
            session = session_of(server, "any")
        return (await session.send(REQUEST).outcome()).record()

    assert asyncio.run(nobody()).error.startswith("cannot connect")


def test_connections_can_be_there_before_the_first_requests() -> None:
    """Requests go out on those, and no time to a first token has a connection in it."""

    async def prepared(server: SseServer) -> tuple[int, list[RequestRecord]]:
        async with server.running():
            spec = TargetSpec(label="fake", kind="http", address=server.url, model="plain")
            session = await open_session(spec, timeout_s=TIMEOUT_S, streams=3)
            while server.connections < 3:
                await asyncio.sleep(0)
            outcomes = await closed_loop(session, [REQUEST] * 6, users=3)
            await session.close()
            return server.connections, [outcome.record() for outcome in outcomes]

    connections, records = asyncio.run(prepared(SseServer({"plain": [" a"]})))
    assert connections == 3
    assert [record.error for record in records] == [""] * 6


def test_to_connect_to_nobody_is_left_to_the_requests() -> None:
    """They say what is wrong."""

    async def nobody() -> RequestRecord:
        server = SseServer({})
        async with server.running():
            session = session_of(server, "any")
        await session.connect(2)
        return (await session.send(REQUEST).outcome()).record()

    assert asyncio.run(nobody()).error.startswith("cannot connect")


def test_a_stuck_server_ends_with_the_time_limit() -> None:
    """The limit is told in the error."""
    record = asyncio.run(ask(SseServer({"stuck": [" a", HOLD]}), "stuck", timeout_s=1.5))
    assert record.error == "no end within 1.5 s"
    assert record.tokens == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_closes_its_connection(stream: bool) -> None:
    """The server sees the reader leave; the record says cancelled and is no error."""

    async def leave(server: SseServer) -> RequestRecord:
        async with server.running():
            session = session_of(server, "held")
            running = session.send(RequestSpec(text="x", stream=stream))
            if stream:
                assert await running.wait_chunks(1)
            else:
                while not server.requests:
                    await asyncio.sleep(0)
            running.cancel()
            outcome = await running.outcome()
            await asyncio.wait_for(server.left.wait(), TIMEOUT_S)
            await session.close()
            return outcome.record()

    record = asyncio.run(leave(SseServer({"held": [" a", HOLD]})))
    assert record.cancelled
    assert record.error == ""
    assert record.tokens == (1 if stream else 0)


def test_waiting_for_a_chunk_that_never_comes_ends_with_the_answer() -> None:
    """It says that there were fewer."""

    async def wait() -> bool:
        server = SseServer({"short": [" a"]})
        async with server.running():
            session = session_of(server, "short")
            stream = session.send(REQUEST)
            reached = await asyncio.wait_for(stream.wait_chunks(99), TIMEOUT_S)
            await session.close()
            return reached

    assert asyncio.run(wait()) is False


def test_the_request_is_greedy_and_asks_for_usage() -> None:
    """What is sent is what every target is asked for."""
    server = SseServer({"plain": [" a"]})
    asyncio.run(ask(server, "plain"))
    assert server.requests == [
        {
            "model": "plain",
            "prompt": "once upon a",
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_an_address_that_is_no_url_is_refused_by_name() -> None:
    """One line that says what to give."""
    with pytest.raises(TargetError, match="give a URL like"):
        HttpSession(TargetSpec(label="x", kind="http", address="https://a"), timeout_s=1)
