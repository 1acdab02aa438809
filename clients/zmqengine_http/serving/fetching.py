"""Images behind URLs of strangers, fetched from public addresses alone.

A name is looked up once, and the connection goes to the address that was checked: a name server that answers
otherwise the second time gains nothing. No proxy of the environment is used, no credentials are sent.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import SplitResult, urljoin, urlsplit

from zmqengine_client.errors import BadRequest
from zmqengine_client.images.sources import FILE_BYTES_MAX

REDIRECTS_MAX = 3
FETCH_S = 10.0
"""Time of one image, with its redirects; the lookup of a name has the system's own bounds."""
THREADS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ImageFetching:
    """Threads that fetch images; they start with the first one."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")

    def submit(self, url: str) -> Future[bytes]:
        """Fetch an image in a thread, after earlier ones. `BadRequest` says why it failed."""
        return self._threads.submit(fetch, url)

    def close(self) -> None:
        """Drop what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def fetch(url: str) -> bytes:
    """The body behind an http or https URL, at most `FILE_BYTES_MAX` bytes. Blocking. Raises `BadRequest`."""
    until = time.monotonic() + FETCH_S
    for _ in range(REDIRECTS_MAX + 1):
        parts = _checked(url)
        try:
            found = _get(parts, public_address(parts), until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = time.monotonic() >= until
            reason = f"took over {FETCH_S:.0f} s" if late else str(error)[:200] or type(error).__name__
            raise BadRequest(f"the image at {_shown(url)} cannot be fetched: {reason}") from None
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise BadRequest(f"the image at {_shown(url)} is behind over {REDIRECTS_MAX} redirects")


def is_public(address: Address) -> bool:
    """Whether an address and the IPv4 address embedded in it, if any, are of the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        # IPv4-compatible addresses, which are deprecated (RFC 4291, 2.5.5.1).
        if int(address) >> 32 == 0:
            return False
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _NAT64):
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = (address.sixtofour, *(address.teredo or ()))
        if not all(is_public(each) for each in inner if each is not None):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def public_address(parts: SplitResult) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address to connect to. Raises `BadRequest` for a host any of whose addresses is not public."""
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for _, _, _, _, address in found:
        if not is_public(ipaddress.ip_address(str(address[0]).partition("%")[0])):
            raise BadRequest(f"the host {host[:100]!r} of an image is no public one: send a data URL")
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and parts.hostname and not parts.username and parts.port != 0
    except ValueError:
        ok = False
    if not ok or any(ord(char) <= 32 or ord(char) > 126 for char in url):
        raise BadRequest(f"{_shown(url)} is no http or https URL of an image")
    return parts


def _get(
    parts: SplitResult, target: tuple[socket.AddressFamily, tuple[str, int]], until: float
) -> bytes | str:
    """The body, or the address that it is at instead."""
    family, address = target
    link = socket.socket(family, socket.SOCK_STREAM)
    if parts.scheme == "https":
        # Before it connects, as the alarm is about this socket: wrapping takes the connection out of the plain one.
        link = ssl.create_default_context().wrap_socket(link, server_hostname=parts.hostname)
    # A server that sends a byte now and then keeps every single wait short.
    alarm = threading.Timer(max(0.0, until - time.monotonic()), _shut, (link,))
    alarm.daemon = True
    alarm.start()
    try:
        link.settimeout(max(0.01, until - time.monotonic()))
        link.connect(address)
        connection = http.client.HTTPConnection(parts.netloc)
        connection.sock = link
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(
            "GET", path, headers={"Accept": "image/*", "User-Agent": "zmqengine", "Connection": "close"}
        )
        response = connection.getresponse()
        if response.status in _REDIRECTS and response.headers.get("Location"):
            return str(response.headers["Location"])
        if response.status != 200:
            raise ValueError(f"its server answers {response.status}")
        body = response.read(FILE_BYTES_MAX + 1)
        if len(body) > FILE_BYTES_MAX:
            raise ValueError(f"it has over {FILE_BYTES_MAX} bytes")
        if time.monotonic() >= until or (response.length or 0) > 0:
            raise ValueError("it is cut off")
        return body
    finally:
        alarm.cancel()
        link.close()


def _shut(link: socket.socket) -> None:
    try:
        # Not TLS's own, which would have another thread read on without it.
        socket.socket.shutdown(link, socket.SHUT_RDWR)
    except OSError:
        link.close()


def _shown(url: str) -> str:
    return repr(url[:200])
