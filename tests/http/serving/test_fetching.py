"""Images behind URLs: fetched from public addresses alone, within bounds, and only where it is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from zmqengine_client.errors import BadRequest
from zmqengine_http.prompt.pictures import Picture, fetched
from zmqengine_http.serving import fetching
from zmqengine_http.serving.fetching import ImageFetching, fetch, is_public, public_address


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("8.8.8.8", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("0.0.0.0", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("224.0.0.1", False), ("240.0.0.1", False),
        ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1", False), ("fc00::1", False),
        ("ff02::1", False), ("::ffff:127.0.0.1", False), ("::ffff:8.8.8.8", True), ("::127.0.0.1", False),
        ("2002:7f00:1::", False), ("2002:a01:203::", False), ("64:ff9b::7f00:1", False), ("64:ff9b::808:808", True),
        ("64:ff9b:1::a00:1", False), ("2001:0:808:808:0:0:80ff:fffe", False), ("2001:db8::1", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_public_internet_are_connected_to(address: str, public: bool) -> None:
    """Also where a private one is mapped, translated or tunnelled."""
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """A server on loopback, which counts as public here, and the paths that were asked for."""
    asked: list[str] = []
    over = threading.Event()

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            elif self.path == "/loop":
                self.send_response(301)
                self.send_header("Location", "/loop")
                self.end_headers()
            elif self.path in ("/image", "/cut", "/slow", "/long"):
                self.send_response(200)
                self.send_header(
                    "Content-Length", {"/cut": "99", "/slow": "99", "/long": str(1 << 40)}.get(self.path, "5")
                )
                self.end_headers()
                self.wfile.write(b"bytes")
                if self.path == "/slow":
                    over.wait(30)
                while self.path == "/long":
                    self.wfile.write(bytes(1 << 20))
            else:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_image_is_fetched_and_redirects_are_followed(site: tuple[str, list[str]]) -> None:
    """Relative and absolute ones."""
    url, asked = site
    assert fetch(f"{url}/image") == b"bytes"
    assert fetch(f"{url}/to//image") == b"bytes"
    assert fetch(f"{url}/to/{url}/image") == b"bytes"
    assert asked[-1] == "/image"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/none", "answers 404"), ("/loop", "over 3 redirects"), ("/cut", "cut off|IncompleteRead"),
        ("/long", "over 20971520 bytes"),
        ("/to/http://127.0.0.2/", "no public one"), ("/to/http://[::1]/", "no public one"),
        ("/to/file:///etc/passwd", "no http or https URL"), ("/to/http://user:key@127.0.0.1/", "no http or https URL"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_says_why(site: tuple[str, list[str]], path: str, reason: str) -> None:
    """Each redirect is checked as the first address was."""
    with pytest.raises(BadRequest, match=reason):
        fetch(site[0] + path)


def test_a_server_that_stops_sending_costs_a_bounded_time(
    site: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it does it."""
    monkeypatch.setattr(fetching, "FETCH_S", 0.5)
    with pytest.raises(BadRequest, match=r"took over|cut off"):
        fetch(f"{site[0]}/slow")


@pytest.mark.parametrize(
    "url", ["http://localhost/a", "http://127.0.0.1:1/a", "http://[::ffff:10.0.0.1]/", "http://0/"]
)
def test_local_names_are_refused_without_a_connection(url: str) -> None:
    """By the address that they are looked up as."""
    with pytest.raises(BadRequest, match=r"no public one|cannot be fetched"):
        fetch(url)


def test_many_urls_of_one_request_leave_threads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four that take ten seconds each kept the next request's waiting for minutes."""
    begun: list[str] = []
    go_on = threading.Event()

    def slow(url: str) -> bytes:
        begun.append(url)
        assert go_on.wait(60)
        return b"x"

    monkeypatch.setattr(fetching, "fetch", slow)

    async def scenario() -> None:
        threads = ImageFetching()
        many = asyncio.create_task(
            fetched([Picture(f"http://a/{number}", "x") for number in range(30)], threads)
        )
        one = asyncio.create_task(fetched([Picture("http://b/", "x")], threads))
        until = time.monotonic() + 60
        while "http://b/" not in begun:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        go_on.set()
        await asyncio.gather(many, one)

    asyncio.run(scenario())
    assert len(begun) == 31


def test_a_slow_server_is_left_in_time_over_https_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a byte now and then: no single wait is long, and four of them held every thread that fetches."""
    monkeypatch.setattr(fetching, "is_public", lambda _: True)
    monkeypatch.setattr(fetching, "FETCH_S", 0.5)
    # A cipher that needs no certificate.
    served, asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    for context in (served, asking):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    monkeypatch.setattr(ssl, "create_default_context", lambda: asking)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with (
            contextlib.suppress(OSError),
            served.wrap_socket(listening.accept()[0], server_side=True) as link,
        ):
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")
            # Until the other side has left.
            while True:
                link.sendall(b"x")
                time.sleep(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    with listening, pytest.raises(BadRequest, match="took over"):
        fetch(f"https://127.0.0.1:{listening.getsockname()[1]}/image")
    thread.join()


@pytest.mark.parametrize("private", [0, 1, 2])
def test_a_host_with_any_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, private: int) -> None:
    """Wherever it stands among them: which of them is connected to is chosen later."""
    addresses = ["93.184.216.34", "8.8.8.8", "1.1.1.1"]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    parts = urlsplit("http://many.example/a.png")
    assert public_address(parts) == (socket.AF_INET, (addresses[0], 80))
    found[private] = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 80))
    with pytest.raises(BadRequest, match="no public one"):
        public_address(parts)
