"""An OpenAI-compatible server that says what it was told to say, when it was told to. The model names the script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

CLOSE = object()
"""In a script: cut the connection here."""
HOLD = object()
"""In a script: say nothing more until the client leaves."""


@dataclass
class SseServer:
    """`scripts` by model: strings of new text, or CLOSE, HOLD, or a number of seconds to wait."""

    scripts: Mapping[str, Sequence[object]]
    tokens_per_text: Mapping[str, int] = field(default_factory=dict)
    keep_alive: bool = True
    chunked: bool = True
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _handlers: list[asyncio.Task[None]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SseServer]:
        """Listen on a free port of loopback."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            server.close()
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.gather(*self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._handlers.append(task)
        try:
            while await self._one_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length")
        )
        request = json.loads(await reader.readexactly(length))
        self.requests.append(request)
        writer.write(self._head())
        if self.status != 200:
            self._write(writer, b'{"error": {"message": "too busy"}}')
        elif not await self._say(reader, writer, self.scripts[request["model"]], bool(request["stream"])):
            return False
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.keep_alive and self.chunked

    def _head(self) -> bytes:
        lines = [f"HTTP/1.{int(self.chunked)} {self.status} x", "Content-Type: text/event-stream"]
        lines += ["Transfer-Encoding: chunked"] if self.chunked else []
        lines += [] if self.keep_alive else ["Connection: close"]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _say(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        script: Sequence[object],
        stream: bool,
    ) -> bool:
        texts: list[str] = []
        for step in script:
            if step is CLOSE:
                writer.transport.abort()
                return False
            if step is HOLD:
                await reader.read()
                self.left.set()
                return False
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            assert isinstance(step, str)
            texts.append(step)
            if stream:
                self._write(writer, event({"choices": [{"index": 0, "text": step}]}))
            await writer.drain()
        tokens = sum(self.tokens_per_text.get(text, 1) for text in texts)
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        if not stream:
            choice = {"index": 0, "text": "".join(texts), "finish_reason": "length"}
            self._write(writer, json.dumps({"choices": [choice], "usage": usage}).encode())
            return True
        self._write(writer, event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        self._write(writer, event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return True

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self.chunked else data)


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(payload)}\n\n".encode()
