"""Who may ask what, and what is written down of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.front import Front, call, chat, get, post, serving
from zmqengine.testing import FakeWorker
from zmqengine_http import HttpConfig
from zmqengine_http.serving import logs
from zmqengine_http.serving.access import Access
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange

KEYS = ("first-key-0", "second-key-1")
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    with serving(HttpConfig(workers=(worker.address,), api_keys=KEYS, cors_origins=(ORIGIN,))) as front:
        yield front


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models"]
)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic first-key-0"},
        {"authorization": "Bearer "},
    ],
)
def test_without_a_key_all_is_401(front: Front, path: str, given: dict[str, str]) -> None:
    """Before the body is read, and with the shape that client libraries know."""
    reply = call(front, "GET" if path == "/v1/models" else "POST", path, b"{}", given)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(front: Front, key: str) -> None:
    """There may be several, so that they can be changed."""
    assert get(front, "/v1/models", authorization=f"Bearer {key}").status == 200
    assert (
        post(front, "/v1/chat/completions", chat(max_tokens=1), authorization=f"bearer {key}").status == 200
    )


@pytest.mark.parametrize("path", ["/health", "/ready", "/openapi.json", "/docs"])
def test_what_tells_nothing_needs_no_key(front: Front, path: str) -> None:
    """Probes of a supervisor have none."""
    assert get(front, path).status == 200


def test_cors_is_for_the_origins_named(front: Front, worker: FakeWorker) -> None:
    """And off without any."""
    ask = {"origin": ORIGIN, "access-control-request-method": "POST"}
    allowed = call(front, "OPTIONS", "/v1/chat/completions", None, ask)
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = call(front, "OPTIONS", "/v1/chat/completions", None, {**ask, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    with serving(HttpConfig(workers=(worker.address,))) as closed:
        reply = get(closed, "/v1/models", origin=ORIGIN)
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_logged_only_if_asked_for(
    worker: FakeWorker, wanted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line is JSON with the request's id; no text of a user is in it by default."""
    config = HttpConfig(workers=(worker.address,), log_prompts=wanted, log_level="debug")
    logs.configure(config)
    with serving(config) as front:
        post(front, "/v1/chat/completions", chat("my secret", max_tokens=3), **{"x-request-id": "mine"})
        post(front, "/v1/chat/completions", chat("my secret", temperature=99))
        post(front, "/tokenize", {"prompt": "my secret"})
    written = capsys.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert [(line["status"], line["path"]) for line in requests] == [
        (200, "/v1/chat/completions"), (400, "/v1/chat/completions"), (200, "/tokenize"),
    ]  # fmt: skip
    assert requests[0]["id"] == "mine"
    assert requests[0]["completion_tokens"] == 3
    assert all(line["id"] for line in requests)
    assert ("my secret" in written) == wanted


def test_the_request_id_comes_back(front: Front) -> None:
    """The caller's if it is sane, else one of ours."""
    assert get(front, "/health", **{"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert get(front, "/health", **{"x-request-id": "x" * 200}).headers["x-request-id"].startswith("req_")
    assert get(front, "/health").headers["x-request-id"].startswith("req_")


def test_an_unexpected_failure_is_a_500_without_its_text(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is for the log; the client gets one sentence, and the next request is served."""

    def broken(*_: object) -> object:
        raise RuntimeError("inner detail")

    monkeypatch.setattr(front.service.pool.__class__, "models", broken)
    with caplog.at_level(logging.ERROR):
        reply = get(front, "/v1/models", authorization=f"Bearer {KEYS[0]}")
    monkeypatch.undo()
    assert (reply.status, reply.error["message"]) == (500, "internal error")
    assert "inner detail" in caplog.text
    assert get(front, "/v1/models", authorization=f"Bearer {KEYS[0]}").status == 200


EVIL = "http://evil.example"


@pytest.fixture(scope="module")
def at_home(worker: FakeWorker) -> Iterator[Front]:
    """As it runs on a desktop: on loopback, without keys."""
    config = HttpConfig(workers=(worker.address,), allow_hosts=("box.local",), cors_origins=(ORIGIN,))
    with serving(config) as front:
        yield front


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "[::2]:1", "10.0.0.1"]
)
def test_a_name_that_leads_here_is_not_ours(at_home: Front, host: str) -> None:
    """DNS rebinding: the page's own name is made to point at 127.0.0.1, so its script may read all answers."""
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/health")):
        reply = call(at_home, method, path, b"{}", {"host": host})
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "box.local:80"])
def test_our_own_names_are_taken(at_home: Front, host: str) -> None:
    """With any port, and those that were added."""
    assert get(at_home, "/v1/models", host=host).status == 200


def test_with_keys_any_name_will_do(front: Front) -> None:
    """A page has no key."""
    assert get(front, "/v1/models", host="evil.example", authorization=f"Bearer {KEYS[0]}").status == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "https://localhost.evil.example", "http://localhost:1"])
def test_a_page_of_another_site_uses_nothing(at_home: Front, origin: str) -> None:
    """A no-cors request of any page would otherwise start a generation."""
    for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
        body = json.dumps(chat(max_tokens=1)).encode()
        reply = call(
            at_home, "POST", "/v1/chat/completions", body,
            {"origin": origin, "content-type": kind, "host": "localhost:8000"},
        )  # fmt: skip
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed")


def test_a_page_of_ours_or_of_an_origin_that_was_named_is_served(at_home: Front) -> None:
    """The same origin needs no CORS; another may read what retries need."""
    assert get(at_home, "/v1/models", origin="http://localhost:8000", host="localhost:8000").status == 200
    reply = get(at_home, "/v1/models", origin=ORIGIN)
    assert reply.status == 200
    exposed = reply.headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after", "retry-after-ms"} <= {name.strip() for name in exposed.split(",")}


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
def test_a_key_comes_in_the_header_of_any_api(worker: FakeWorker, header: str) -> None:
    """OpenAI's, Anthropic's and Azure's; and it may have letters beyond ASCII."""
    key = "schlüssel-9"
    with serving(HttpConfig(workers=(worker.address,), api_keys=(key,))) as front:
        prefix = "Bearer " if header == "authorization" else ""
        value = (prefix + key).encode().decode("latin-1")
        assert get(front, "/v1/models", **{header: value}).status == 200
        assert get(front, "/v1/models", **{header: prefix + "schlussel-9"}).status == 401
        assert "no API key" in get(front, "/v1/models").error["message"]


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "text/plain"}, {"content-type": "multipart/form-data"}, {"content-encoding": "gzip"}],
)
def test_a_body_that_is_not_json_says_so(at_home: Front, headers: dict[str, str]) -> None:
    """415, not a remark about its first byte."""
    reply = call(at_home, "POST", "/v1/chat/completions", b"\x1f\x8b", headers)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


def refused(
    method: str = "GET", version: str = "1.1", options: dict[str, Any] | None = None, **headers: str | None
) -> tuple[int, str | None] | None:
    """Status and code of what a front-end on loopback without keys says to these headers; None: it serves."""
    given = {"host": "localhost", **headers}
    raw = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in given.items()
        if value is not None
    ]
    raw += [raw[0]] if "again" in given else []
    scope = {"method": method, "http_version": version, "headers": raw}
    exchange = Exchange(scope, None, None)  # type: ignore[arg-type]
    try:
        Access(HttpConfig(workers=("w",), **(options or {}))).check(exchange, open_to_all=False)
    except ApiError as error:
        return error.status, error.code
    return None


def test_a_request_has_one_host() -> None:
    """Of two, a proxy in front may have looked at the other; only HTTP/1.0 may have none."""
    assert refused() is None
    assert refused(again="") == (400, "bad_host")
    assert refused(host=None) == (400, "bad_host")
    assert refused(host=None, version="1.0") is None


def test_a_page_cannot_be_of_this_server_where_no_host_was_named() -> None:
    """The origin of a sandboxed frame or a file has no name either."""
    for origin in ("null", "file://", EVIL):
        assert refused(host=None, version="1.0", origin=origin) == (403, "origin_not_allowed")
    assert refused(origin="http://localhost") is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:8000.evil.com", "http://evil-localhost:8000", "http://localhost:80001",
        "http://localhost:8000@evil.com", "http://evil.com/localhost:8000", "http://localhost",
    ],
)  # fmt: skip
def test_an_origin_is_this_servers_only_if_its_host_is_the_same(origin: str) -> None:
    """To have the name of this server in its own is not enough."""
    assert refused(host="localhost:8000", origin=origin) == (403, "origin_not_allowed")
    assert refused(host="localhost:8000", origin="http://LOCALHOST:8000") is None


@pytest.mark.parametrize(
    ("options", "host", "served"),
    [
        ({}, "[::1]", True),
        ({}, "[::2]", False),
        ({"host": "127.0.0.9"}, "127.0.0.9:80", True),
        ({"host": "127.0.0.9"}, "127.0.0.8:80", False),
        ({"host": "0:0:0:0:0:0:0:1"}, "[0:0:0:0:0:0:0:1]:80", True),
        ({"host": "0:0:0:0:0:0:0:1"}, "0:0:0:0:0:0:0:1:80", False),
        ({"allow_hosts": ("*",)}, "evil.example", True),
        ({"host": "0.0.0.0"}, "evil.example", True),
        ({"host": "0.0.0.0", "api_keys": KEYS}, "evil.example", False),
    ],
)
def test_names_are_checked_where_only_this_machine_may_ask(
    options: dict[str, Any], host: str, served: bool
) -> None:
    """On loopback without keys. An address of one's own is a name; with keys, they decide."""
    if "api_keys" in options:
        assert refused(options=options, host=host) == (401, "invalid_api_key")
    else:
        assert refused(options=options, host=host) == (None if served else (403, "host_not_allowed"))


def test_every_page_may_ask_where_that_was_said() -> None:
    """`--cors-origin *`; and a type of content that is JSON by its ending is JSON."""
    assert refused(origin=EVIL, options={"cors_origins": ("*",)}) is None
    assert refused(origin=EVIL, options={"cors_origins": (ORIGIN,)}) == (403, "origin_not_allowed")
    assert refused("POST", content_type="application/vnd.api+json; charset=utf-8") is None
    assert refused("POST", content_type="application/vnd.api+xml") == (415, "unsupported_media_type")
    assert refused("POST", content_encoding="gzip") == (415, "unsupported_media_type")
