"""One HTTP request and its response over ASGI."""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

import msgspec

from zmqengine_http.serving.body_room import BodyRoom
from zmqengine_http.serving.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = (b"content-type", b"application/json")
EVENT_STREAM: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without it nginx buffers events.
    (b"x-accel-buffering", b"no"),
)
_FIELD_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_KEYWORD = re.compile(r"[^\w.:$ -]", re.ASCII)
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Disconnected(Exception):
    """The client disconnected before the response was complete."""


class Exchange:
    """A request and its response: sent once, or with `start` followed by `write` until the last part.

    `id` is the client's X-Request-Id or a generated one; it is in the response and the log. `facts` are
    fields of the log line. `stream_headers` are those of a stream, server-sent events unless the API has others.
    `caller` names the accepted API key by a digest; empty for a server without keys. `operates`: whether it is one of
    the operators' keys; None for a server without any.
    `keep_alive_s` is what the request says of its model; `waited`: its stream was begun before the model was loaded.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        # Reversed, so that the first of repeated headers wins.
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.id = _request_id(self.header(b"x-request-id"))
        self.facts: dict[str, object] = {}
        self.caller = ""
        self.operates: bool | None = None
        self.stream_headers = EVENT_STREAM
        self.keep_alive_s: float | None = None
        self.waited = False
        self.status = 0
        self.body_bytes = 0
        self._more_body = True
        self._headers: list[tuple[bytes, bytes]] = []
        self._ignored: list[str] = []
        self._receive = receive
        self._send = send
        self._gone = False
        self._complete = False

    @property
    def started(self) -> bool:
        """Whether the status has been sent."""
        return self.status != 0

    @property
    def unloads_pinned(self) -> bool:
        """Whether the caller may unload a model that is there for all callers."""
        return bool(self.operates) or not self.caller

    def check_operates(self) -> None:
        """Raise a 403 for a caller that may not load and unload models."""
        if self.operates is False:
            raise ApiError(
                403, "this key loads and unloads no models: ask the operator", code="not_authorized"
            )

    def header(self, name: bytes) -> str | None:
        value = self.raw_header(name)
        return None if value is None else value.decode("latin-1")

    def raw_header(self, name: bytes) -> bytes | None:
        return self._fields.get(name)

    def note_ignored(self, names: Sequence[str], inside: int) -> None:
        """Name ignored fields of the body in a header; the log has the number of them and of ignored keys `inside`
        others."""
        if names:
            self._ignored += [name for name in names[:32] if _FIELD_NAME.fullmatch(name)]
            self.facts["ignored_fields"] = len(names)
        if inside:
            self.facts["unknown_inside"] = inside

    def note_unenforced(self, keywords: Sequence[str]) -> None:
        """Report schema keywords that the constraint does not enforce, in a header and the log."""
        if keywords:
            shown = [_KEYWORD.sub("", keyword)[:64] for keyword in keywords[:32]]
            self._headers.append((b"x-unenforced-keywords", ", ".join(shown).encode()))
            self.facts["unenforced_keywords"] = len(keywords)

    async def read_body(self, bytes_max: int, room: BodyRoom) -> bytes:
        """Read the request body. `body_bytes` are taken of `room`, also by an error.

        Raises a 413 as soon as it exceeds `bytes_max`, `Overloaded` as soon as there is no room, or `Disconnected`.
        """
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit():
            if int(declared[:20]) > bytes_max:
                raise _too_long(bytes_max)
            room.check(int(declared))
        parts: list[bytes] = []
        while True:
            part = await self._receive_part()
            if self.body_bytes + len(part) > bytes_max:
                raise _too_long(bytes_max)
            room.check(self.body_bytes + len(part), self.body_bytes)
            self.body_bytes += len(part)
            room.held += len(part)
            parts.append(part)
            if not self._more_body:
                return b"".join(parts)

    async def _receive_part(self) -> bytes:
        """The next part of the body."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        self._more_body = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def discard_body(self, bytes_max: int) -> None:
        """Read the rest of a refused body, at most `bytes_max`, if the server will close its connection.

        A connection that is closed with bytes unread is reset, and its client never sees the refusal.
        """
        closes = (self.header(b"connection") or "").lower() == "close" or self.scope["http_version"] == "1.0"
        while closes and self._more_body and bytes_max > 0:
            bytes_max -= len(await self._receive_part())

    async def unless_gone(self, work: Awaitable[None]) -> None:
        """Await `work`; if the client disconnects first, cancel it and raise `Disconnected`.

        The body must have been read. A cancelled `work` has finished its clean-up when this returns.
        """
        task = asyncio.current_task()
        assert task is not None
        # Only the watcher needs a new task; the work runs in the present one.
        watching = asyncio.get_running_loop().create_task(self._cancel_when_gone(task))
        try:
            await work
        except asyncio.CancelledError:
            if not self._gone:
                raise
            if sys.version_info >= (3, 11):
                task.uncancel()
            raise Disconnected from None
        finally:
            watching.cancel()

    async def send(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.write(body, last=True)

    async def send_json(self, document: object) -> None:
        """Send a document as a whole response with status 200."""
        await self.send(200, [JSON], msgspec.json.encode(document))

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send status and headers; the body follows with `write`."""
        self.status = status
        id_ = self.id.encode()
        ignored = [(b"x-ignored-fields", ", ".join(self._ignored).encode())] if self._ignored else []
        await self._send(
            {
                "type": "http.response.start", "status": status,
                # Anthropic's clients read the id under the second name.
                "headers": [*headers, (b"x-request-id", id_), (b"request-id", id_), *ignored, *self._headers],
            }
        )  # fmt: skip

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body at once. Waits while the client does not read (backpressure)."""
        self._complete = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _cancel_when_gone(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # Servers also report a disconnect after the response is complete.
        if not self._complete:
            self._gone = True
            task.cancel()


def _request_id(given: str | None) -> str:
    return given if given and _CLIENT_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _too_long(bytes_max: int) -> ApiError:
    return ApiError(413, f"the body is longer than {bytes_max} bytes", code="request_too_large")
