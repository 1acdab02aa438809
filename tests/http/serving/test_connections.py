"""The HTTP connection itself, on raw sockets: upgrades, pipelines, sizes, silence."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, chat, get, post, serving, wait_until
from tests.http.scripted import ScriptedClient
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.serving import http_protocol

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat()).encode()
UPGRADES = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "foo": "Connection: upgrade\r\nUpgrade: foo\r\n",
}


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with serving(HttpConfig(), lambda address, on_event: ScriptedClient(lambda prompt: "yes")) as front:
        yield front


def connect(front: Front, received_bytes: int | None = None) -> socket.socket:
    """A connection, with a small buffer for what it is sent if that is given."""
    connection = socket.socket()
    if received_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", front.port))
    return connection


def head(headers: str = "", *, body: bytes = BODY, path: str = CHAT) -> bytes:
    """The head of a POST."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode()


def answers(connection: socket.socket, count: int) -> list[tuple[int, Any]]:
    """Status and document of so many responses; after them nothing more has come."""
    data, found = b"", list[tuple[int, Any]]()
    while len(found) < count:
        head, separator, rest = data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")),
            None,
        )
        if separator and length is not None and len(rest) >= length:
            found.append((int(head[9:12]), json.loads(rest[:length])))
            data = rest[length:]
            continue
        more = connection.recv(65536)
        assert more, f"hung up after {data!r}"
        data += more
    assert not data
    return found


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("apart", [False, True], ids=["one-segment", "body-later"])
def test_a_request_with_an_upgrade_header_is_answered(front: Front, upgrade: str, apart: bool) -> None:
    """curl --http2, Java's HttpClient and Ktor send it by default on http://; uvicorn #2722, httptools #124."""
    with connect(front) as connection:
        if apart:
            connection.sendall(head(upgrade))
            connection.sendall(BODY[:10])
            connection.sendall(BODY[10:])
        else:
            connection.sendall(head(upgrade) + BODY)
        ((status, document),) = answers(connection, 1)
        assert (status, document["choices"][0]["message"]["content"]) == (200, "yes")


def test_a_body_behind_an_upgrade_is_never_a_request(front: Front) -> None:
    """It was, and behind a proxy that is somebody else's request: smuggling."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(front) as connection:
        connection.sendall(head(UPGRADES["foo"], body=inner))
        connection.sendall(inner)
        ((status, document),) = answers(connection, 1)
        assert (status, document["error"]["code"]) == (400, "invalid_json")
        connection.sendall(head() + BODY)
        assert [status for status, _ in answers(connection, 1)] == [200]


@pytest.mark.parametrize("together", [True, False])
def test_requests_pipelined_behind_an_upgrade_are_answered_in_order(front: Front, together: bool) -> None:
    """An upgrade that is not made changes nothing of what follows; a chunked body neither."""
    chunked = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{UPGRADES['h2c']}Transfer-Encoding: chunked\r\n\r\n".encode()
        + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    parts = [head(UPGRADES["h2c"]) + BODY, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", chunked]
    with connect(front) as connection:
        for part in [b"".join(parts)] if together else parts:
            connection.sendall(part)
        found = answers(connection, 3)
    assert [status for status, _ in found] == [200] * 3
    assert found[1][1] == {"status": "ok"}


def test_endless_upgrades_in_one_piece_end(front: Front) -> None:
    """Each costs a new parser: a bounded number of them."""
    one = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    with connect(front) as connection:
        connection.sendall(one * 500)
        data = b"x"
        while data:
            data = connection.recv(65536)
    assert get(front, "/health").status == 200


@pytest.mark.parametrize(
    "raw", [b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
def test_a_tunnel_is_refused(front: Front, raw: bytes) -> None:
    """And HTTP/2 without asking first."""
    with connect(front) as connection:
        connection.sendall(raw + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = connection.recv(65536)
        assert reply.startswith((b"HTTP/1.1 405", b"HTTP/1.1 400"))
        while more := connection.recv(65536):
            reply += more
    assert reply.count(b"HTTP/1.1") == 1


def test_a_head_has_a_size(front: Front) -> None:
    """In one header or in many, finished or not; the neighbours are served."""
    for filler in (b"X: " + b"a" * 300_000, b"X: a\r\n" * 50_000):
        with connect(front) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + filler)
            assert connection.recv(100).startswith(b"HTTP/1.1 431")
    assert get(front, "/health").status == 200


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (66_000, b"431"), (100_000, b"431")])
@pytest.mark.parametrize("place", ["path", "one header", "many headers"])
@pytest.mark.parametrize("pieces", [1, 40])
def test_a_whole_head_has_a_size_too(front: Front, size: int, status: bytes, place: str, pieces: int) -> None:
    """However it is cut on the way: a server may read it at once."""
    target = b"/health?" + b"a" * size if place == "path" else b"/health"
    filler = {
        "path": b"",
        "one header": b"X: " + b"a" * size + b"\r\n",
        "many headers": b"X: abc\r\n" * (size // 8),
    }
    raw = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + filler[place] + b"\r\n"
    with connect(front) as connection:
        with contextlib.suppress(OSError):
            for start in range(0, len(raw), len(raw) // pieces + 1):
                connection.sendall(raw[start : start + len(raw) // pieces + 1])
        assert connection.recv(100).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", b""), (b"GET /hea", b"HTTP/1.1 408"), (head(body=b"x" * 100) + b"x", b"HTTP/1.1 408")],
    ids=["nothing", "half-a-head", "half-a-body"],
)
def test_an_unfinished_request_is_not_kept_for_ever(
    front: Front, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: bytes
) -> None:
    """A time for the head, and for silence in a body."""
    monkeypatch.setattr(http_protocol.HttpProtocol, "head_timeout_s", 0.3)
    monkeypatch.setattr(http_protocol.HttpProtocol, "body_timeout_s", 0.3)
    front.server.config.timeout_keep_alive = 1
    try:
        with connect(front) as connection:
            connection.sendall(sent)
            assert connection.recv(100)[:12] == status
    finally:
        front.server.config.timeout_keep_alive = 75
    wait_until(lambda: not front.server.server_state.connections, "the connection is gone")


def test_a_slow_body_is_waited_for(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is silence, not how long all of it takes: a fifth longer than a silence may last."""
    monkeypatch.setattr(http_protocol.HttpProtocol, "body_timeout_s", 3.0)
    pieces = [BODY[place : place + 10] for place in range(0, len(BODY), 10)]
    with connect(front) as connection:
        connection.sendall(head() + pieces[0])
        for piece in pieces[1:]:
            threading_wait(3.6 / (len(pieces) - 1))
            connection.sendall(piece)
        assert [status for status, _ in answers(connection, 1)] == [200]


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: localhost\r\n"], ids=["none", "two"])
def test_a_request_has_one_host(front: Front, hosts: str) -> None:
    """RFC 9112, section 3.2: anything else MUST be a 400."""
    with connect(front) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
        ((status, _),) = answers(connection, 1)
    assert status == 400


def test_a_client_of_http_1_0_gets_its_stream_unchunked(front: Front) -> None:
    """It does not know chunks: the events come in one piece, and the connection ends."""
    body = json.dumps(chat(stream=True)).encode()
    with connect(front) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        data = b""
        while more := connection.recv(65536):
            data += more
    head_, _, events = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_clients_that_stop_reading_end_alone() -> None:
    """Two of them, with much output each: after a while they are gone, their rows too, and others are served."""
    config = FakeEngineConfig(rows_max=64, context_tokens=1_000_000)
    greedy = chat(stream=True, n=4, logprobs=True, top_logprobs=20, ignore_eos=True, max_tokens=900_000)
    body = json.dumps(greedy).encode()
    with (
        FakeWorker(config, process=True, rows_max=64) as worker,
        serving(HttpConfig(workers=(worker.address,), write_timeout_ms=500)) as front,
    ):
        stalled = [connect(front, received_bytes=4096) for _ in range(2)]
        for connection in stalled:
            connection.sendall(head(body=body) + body)
        # One byte shows that it has begun; from then on it reads nothing.
        assert [connection.recv(1) for connection in stalled] == [b"H"] * 2
        (link,) = front.service.pool.workers
        wait_until(lambda: link.running == 0, "all have ended")
        wait_until(lambda: post(front, CHAT, chat(max_tokens=3)).status == 200, "others are served")
        for connection in stalled:
            connection.close()


def threading_wait(seconds: float) -> None:
    """Let time pass between two pieces of a slow sender."""
    import threading

    threading.Event().wait(seconds)
