"""The part of the hub's HTTP interface that fetching a model uses, on a free port of this process."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Holds one model. `paths` are those that were asked for; `broken` files end half-way, once."""

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        self.model = model
        self.files = dict(files)
        self.paths: list[str] = []
        self.broken: set[str] = set()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler: http.server.BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = handler.path.split("?")[0]
        self.paths.append(path)
        api, resolve = f"/api/models/{self.model}", f"/{self.model}/resolve/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in self.files.items()]
            document = {"id": self.model, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self._send(
                handler, 200, json.dumps(document).encode(), {"Content-Type": "application/json"}, with_body
            )
        elif path.startswith(f"{api}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": _etag(body)}
                for name, body in self.files.items()
            ]
            self._send(
                handler, 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, with_body
            )
        elif path.startswith(resolve) and path.split("/", 5)[5] in self.files:
            self._send_file(handler, path.split("/", 5)[5], with_body)
        else:
            code = "EntryNotFound" if path.startswith(resolve) else "RepoNotFound"
            self._send(handler, 404, b"{}", {"X-Error-Code": code}, with_body)

    def _send_file(self, handler: http.server.BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        body = self.files[name]
        headers = {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = handler.headers.get("Range", "")
        status = 200
        if wanted.startswith("bytes="):
            first = int(wanted.removeprefix("bytes=").split("-")[0] or 0)
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            body, status = body[first:], 206
        if with_body and name in self.broken:
            self.broken.discard(name)
            handler.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2])
            handler.close_connection = True
            return
        self._send(handler, status, body, headers, with_body)

    @staticmethod
    def _send(
        handler: http.server.BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str],
        with_body: bool,
    ) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if with_body:
            handler.wfile.write(body)


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
