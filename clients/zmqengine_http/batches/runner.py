"""Runs batches behind all other requests: each line is a request to this front-end, its response a line of a file.

A batch outlives its front-end: the next one goes on where the results end. Of several processes the one that holds the
lock of a batch runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from zmqengine.paths import replace_file
from zmqengine_client.core.embedding import BATCH
from zmqengine_http.batches.job import ENDED, BatchJob, BatchLine
from zmqengine_http.batches.stored_files import NOBODY, Storage, lines_of, new_id
from zmqengine_http.serving import logs
from zmqengine_http.serving.access import CALLER_KEY

App = Callable[[Any, Any, Any], Awaitable[None]]
IN_FLIGHT = 16
"""Lines under way at once. More would wait in the worker, where a later and more urgent request passes them anyway."""
BUSY = frozenset({429, 503})
RETRY_S = 1.0


class Batches:
    """The batches of all callers, below `root`, run by requests to `app`."""

    def __init__(self, root: Path, app: App) -> None:
        self.root = root
        self._app = app
        self._running: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def path(self, owner: str, id_: str) -> Path:
        """The file of a batch."""
        return self.root / "batches" / (owner or NOBODY) / f"{id_}.json"

    def all(self, owner: str) -> list[BatchJob]:
        """Every batch of a caller, the newest first."""
        found = [read(path) for path in self.path(owner, "").parent.glob("batch_*.json")]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def start(self, owner: str, batch: BatchJob) -> None:
        """Keep a batch and run it."""
        path = self.path(owner, batch.id)
        write(path, batch)
        if batch.status not in ENDED:
            self._running[batch.id] = asyncio.create_task(self._run(owner, path))

    def cancel(self, owner: str, id_: str) -> None:
        """Have a batch begin no further line, whichever process runs it."""
        cancel_mark(self.path(owner, id_)).touch()

    def resume(self) -> None:
        """Run every batch that has not ended."""
        for path in self.root.glob("batches/*/batch_*.json"):
            if read(path).status not in ENDED:
                owner = path.parent.name
                task = asyncio.create_task(self._run("" if owner == NOBODY else owner, path))
                self._running[path.stem] = task

    async def close(self) -> None:
        """Stop; a later front-end goes on."""
        self._closing = True
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, owner: str, path: Path) -> None:
        with _locked(path) as is_ours:
            if is_ours:
                try:
                    await _Run(self._app, Storage(self.root, owner), owner, path, lambda: self._closing).run()
                except OSError as error:
                    logs.warning("a batch stands still", batch=path.stem, reason=str(error))
        self._running.pop(path.stem, None)


class _Run:
    """One run of a batch, up to its end or that of the front-end."""

    def __init__(
        self, app: App, storage: Storage, owner: str, path: Path, is_closing: Callable[[], bool]
    ) -> None:
        self._app = app
        self._is_closing = is_closing
        self._storage = storage
        self._owner = owner
        self._path = path
        self._batch = read(path)

    async def run(self) -> None:
        batch = self._batch
        batch.output_file_id = batch.output_file_id or new_id("file-")
        batch.error_file_id = batch.error_file_id or new_id("file-")
        write(self._path, batch)
        done = {*self._done(batch.output_file_id), *self._done(batch.error_file_id)}
        lines = lines_of(self._storage.path(batch.input_file_id))
        pending = (line for text in lines if (line := _line(text)).custom_id not in done)
        await asyncio.gather(*(self._take(pending) for _ in range(IN_FLIGHT)))
        if not self._is_closing():
            self._end()

    def _done(self, id_: str) -> list[str]:
        """The lines that an earlier run has finished. A line that it left unfinished is cut off."""
        path = self._storage.path(id_)
        if not path.exists():
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        return [msgspec.json.decode(line)["custom_id"] for line in whole.splitlines()]

    @property
    def _stop(self) -> str:
        """The state in which the batch ends early; empty while it goes on."""
        if cancel_mark(self._path).exists():
            return "cancelled"
        return "expired" if time.time() >= (self._batch.expires_at or 0) else ""

    async def _take(self, pending: Iterator[BatchLine]) -> None:
        for line in pending:
            while not (self._stop or self._is_closing()):
                status, request_id, body, retry_s = await self._ask(line)
                # A line refused because this front-end shuts down is left to the next front-end.
                if status not in BUSY and not self._is_closing():
                    self._keep(line, status, request_id, body)
                    break
                await asyncio.sleep(retry_s)
            if self._stop or self._is_closing():
                return

    async def _ask(self, line: BatchLine) -> tuple[int, str, bytes, float]:
        """The response to a line: its status, id, body, and the time after which to ask again."""
        asked = dict(line.body)
        asked.pop("stream", None)
        asked.setdefault("priority", BATCH)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": line.url, "raw_path": line.url.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], CALLER_KEY: self._owner,
        }  # fmt: skip
        messages = [{"type": "http.request", "body": msgspec.json.encode(asked)}]
        parts: list[bytes] = []
        head: dict[str, Any] = {}

        async def receive() -> dict[str, Any]:
            # It stays for the answer.
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        headers = dict(head["headers"])
        retry_s = float(headers.get(b"retry-after-ms", RETRY_S * 1000)) / 1000
        return int(head["status"]), headers[b"x-request-id"].decode(), b"".join(parts), retry_s

    def _keep(self, line: BatchLine, status: int, request_id: str, body: bytes) -> None:
        batch, failed = self._batch, status >= 400
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        shown = {"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": response, "error": None}
        id_ = batch.error_file_id if failed else batch.output_file_id
        assert id_ is not None
        with self._storage.path(id_).open("ab") as file:
            file.write(msgspec.json.encode(shown) + b"\n")
        batch.request_counts.failed += failed
        batch.request_counts.completed += not failed
        write(self._path, batch)

    def _end(self) -> None:
        batch = self._batch
        batch.status = self._stop or "completed"
        setattr(batch, f"{batch.status}_at", int(time.time()))
        for name in ("output_file_id", "error_file_id"):
            id_ = getattr(batch, name)
            if self._storage.path(id_).exists():
                self._storage.describe(
                    id_, f"{batch.id}_{name.removesuffix('_file_id')}.jsonl", "batch_output"
                )
            else:
                setattr(batch, name, None)
        write(self._path, batch)
        cancel_mark(self._path).unlink(missing_ok=True)
        logs.info("batch", id=batch.id, status=batch.status, lines=batch.request_counts.total)


def read(path: Path) -> BatchJob:
    """A batch as it was kept."""
    return msgspec.json.decode(path.read_bytes(), type=BatchJob)


def write(path: Path, batch: BatchJob) -> None:
    """Keep the state of a batch."""
    replace_file(path, msgspec.json.encode(batch))


def cancel_mark(path: Path) -> Path:
    """The file beside a batch that says that it is to be cancelled."""
    return path.with_suffix(".cancel")


def _line(text: bytes) -> BatchLine:
    return msgspec.json.decode(text, type=BatchLine)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the batch, for the time of the block."""
    with path.with_suffix(".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
