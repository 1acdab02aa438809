"""The HTTP/1.1 connection: uvicorn's httptools protocol with the limits that it lacks.

- An `Upgrade` header is ignored, as RFC 9110 allows: the request is answered on HTTP/1.1 and keeps its body.
  By itself the parser stops after the headers, and the body would be parsed as the next request.
- The head of a request is limited in size and time, the body in time between bytes, so that no unfinished
  request holds a connection for ever.
- A client that reads nothing of its response for a while is disconnected.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from zmqengine_http.config import HttpConfig

HEAD_BYTES_MAX = 64 * 1024
HEAD_TIMEOUT_S = 20.0
BODY_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 30.0
UPGRADES_MAX = 64
"""Pipelined requests with an Upgrade header in one read."""

_HOP_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _HeadTooLong(Exception):
    """Raised in a callback, which the parser turns into an error of its own."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. The class attributes are its limits; subclasses may override them."""

    head_bytes_max = HEAD_BYTES_MAX
    head_timeout_s = HEAD_TIMEOUT_S
    body_timeout_s = BODY_TIMEOUT_S
    write_timeout_s = WRITE_TIMEOUT_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_bytes = 0
        self._reading_timer: asyncio.TimerHandle | None = None
        self._writing_timer: asyncio.TimerHandle | None = None
        self._unwritten = 0

    # --- the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._end_writing_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; where it stops at an upgrade, replay the head without the upgrade headers."""
        self._unset_keepalive_if_required()
        for _ in range(UPGRADES_MAX):
            head_begins = self._in_head and self._head_bytes == 0
            if self._in_head:
                self._head_bytes += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self.parser.get_method() in (b"CONNECT", b"PRI"):
                    return self._refuse(405, "Method Not Allowed")
                data = self._head_without_upgrade() + data[stopped.args[0] :]
                continue
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, _HeadTooLong):
                    return self._refuse(431, "Request Header Fields Too Large")
                return self._refuse(400, "Bad Request")
            if self._in_head and self._head_bytes > self.head_bytes_max:
                self._refuse(431, "Request Header Fields Too Large")
            # Timers are set once per read, not in the parser's callbacks: most requests come whole and need
            # none.
            if not self._in_head:
                self._expect(self.body_timeout_s)
            elif self._head_bytes == 0:
                self._expect(None)
            elif head_begins:
                self._expect(self.head_timeout_s)
            return None
        return self._refuse(400, "Bad Request")

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has just read, without upgrade headers, for a new parser."""
        head = [
            b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode()),
            *(b"%s: %s" % header for header in self.headers if header[0] not in _HOP_HEADERS),
        ]
        if not self.parser.should_keep_alive():
            head.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._head_bytes = 0
        return b"\r\n".join(head) + b"\r\n\r\n"

    # --- the parser's callbacks ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        # A head that came in one piece has not been counted yet.
        lines = [self.url, *(part for header in self.headers for part in header)]
        if sum(map(len, lines)) + 2 * len(lines) > self.head_bytes_max:
            raise _HeadTooLong
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    # --- time ------------------------------------------------------------------------------------------------

    def _expect(self, wait_s: float | None) -> None:
        """Close the connection unless data comes within `wait_s`; None cancels the timer."""
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        self._reading_timer = None if wait_s is None else self.loop.call_later(wait_s, self._too_slow)

    def _too_slow(self) -> None:
        self._reading_timer = None
        if self.flow.read_paused:
            # Reading is paused by us: the response to the previous request is still being sent.
            self._expect(self.body_timeout_s)
        elif self._in_head and self._head_bytes == 0:
            self.transport.close()
        else:
            self._refuse(408, "Request Timeout")

    def _refuse(self, status: int, reason: str) -> None:
        """Respond to an incomplete request, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % (
                reason.encode()
            )
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % (status, reason.encode(), len(body))
                + body
            )
        self.transport.close()

    def pause_writing(self) -> None:
        """The write buffer is full: pause the application, and start the write timeout."""
        super().pause_writing()
        self._unwritten = self.transport.get_write_buffer_size()
        self._end_writing_timer()
        self._writing_timer = self.loop.call_later(self.write_timeout_s, self._look_at_writing)

    def resume_writing(self) -> None:
        """The client has caught up: stop the write timeout."""
        self._end_writing_timer()
        super().resume_writing()

    def _look_at_writing(self) -> None:
        unwritten = self.transport.get_write_buffer_size()
        if unwritten >= self._unwritten:
            self.logger.warning("a client took nothing of its response for %g s", self.write_timeout_s)
            self.transport.abort()
            return
        self._unwritten = unwritten
        self._writing_timer = self.loop.call_later(self.write_timeout_s, self._look_at_writing)

    def _end_writing_timer(self) -> None:
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None


def protocol_class(config: HttpConfig) -> type[HttpProtocol]:
    """The protocol with the limits of this configuration."""

    class Configured(HttpProtocol):
        write_timeout_s = config.write_timeout_ms / 1000

    return Configured
