"""Access control: by API key, by the Host header, and by the Origin of a browser's page.

A page of any site can make a browser send requests to localhost, or to a name of its own that resolves there
(DNS rebinding). The Origin header reveals the first, the Host header the second.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from zmqengine.protocol.addresses import is_loopback_host
from zmqengine_http.config import HttpConfig
from zmqengine_http.serving.errors import ApiError
from zmqengine_http.serving.exchange import Exchange

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_JSON_TYPES = frozenset({"", "application/json", "application/x-www-form-urlencoded"})
"""Content types accepted as JSON. curl's default is one of them: a browser sends it only with an Origin
header."""


CALLER_KEY = "zmqengine.caller"
"""The key of a scope that this process made itself, for a caller that it has accepted before."""


class Access:
    """Checks every request of a front-end."""

    def __init__(self, config: HttpConfig) -> None:
        self._digests = [_digest(key.encode("utf-8", "surrogateescape")) for key in config.keys]
        self._operators = self._digests[len(config.api_keys) :]
        self._origins = frozenset(config.cors_origins)
        self._hosts: frozenset[str] | None = None
        if not config.keys and is_loopback_host(config.host) and "*" not in config.allow_hosts:
            own = f"[{config.host}]" if ":" in config.host else config.host
            self._hosts = _LOOPBACK_NAMES | {name.lower() for name in (own, *config.allow_hosts)}

    def check(self, exchange: Exchange, *, open_to_all: bool, takes_body: bool = True) -> None:
        """Raise a 400, 401, 403 or 415 for a request that must not be served, and note its caller; with `open_to_all`
        no key is needed."""
        if CALLER_KEY in exchange.scope:
            exchange.caller = exchange.scope[CALLER_KEY]
            return
        host = self._check_host(exchange)
        self._check_origin(exchange, host)
        if takes_body and exchange.scope["method"] == "POST":
            _check_content(exchange)
        if self._digests and not open_to_all:
            digest = self._accepted(exchange)
            exchange.caller = hashlib.sha256(b"zmqengine caller " + digest).hexdigest()[:32]
            exchange.operates = digest in self._operators if self._operators else None

    def _check_host(self, exchange: Exchange) -> str:
        hosts = [value for name, value in exchange.scope["headers"] if name == b"host"]
        if len(hosts) > 1 or (not hosts and exchange.scope["http_version"] != "1.0"):
            raise ApiError(400, "a request has one Host header", code="bad_host")
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._hosts is not None and hosts and name not in self._hosts:
            raise ApiError(
                403,
                f"this server is not known as {name[:100]!r}; if it should be, start it with --allow-host",
                code="host_not_allowed",
            )
        return host

    def _check_origin(self, exchange: Exchange, host: str) -> None:
        origin = exchange.header(b"origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if not host or urlsplit(origin).netloc.lower() != host:
            raise ApiError(
                403,
                f"pages from {origin[:100]!r} may not use this server; if they should, start it with --cors-origin",
                code="origin_not_allowed",
            )

    def _accepted(self, exchange: Exchange) -> bytes:
        """The digest of the accepted key. Raises a 401 without one."""
        given = [_bearer(exchange), exchange.raw_header(b"x-api-key"), exchange.raw_header(b"api-key")]
        keys = [key for key in given if key]
        if not keys:
            raise ApiError(
                401, "no API key was given: send it as Authorization: Bearer KEY, or as x-api-key",
                code="invalid_api_key",
            )  # fmt: skip
        # Every pair is compared, in constant time: digests have equal lengths, and the list is made whole.
        accepted = [
            digest for key in keys for digest in self._digests if hmac.compare_digest(_digest(key), digest)
        ]
        if not accepted:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return accepted[0]


def _check_content(exchange: Exchange) -> None:
    kind = (exchange.header(b"content-type") or "").partition(";")[0].strip().lower()
    if kind not in _JSON_TYPES and not kind.endswith("+json"):
        raise ApiError(
            415, f"the body must be application/json, not {kind[:100]}", code="unsupported_media_type"
        )
    coding = (exchange.header(b"content-encoding") or "identity").strip().lower()
    if coding != "identity":
        raise ApiError(
            415,
            f"the body is encoded as {coding[:100]}: send it without a content-encoding",
            code="unsupported_media_type",
        )


def _bearer(exchange: Exchange) -> bytes | None:
    scheme, _, key = (exchange.raw_header(b"authorization") or b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
