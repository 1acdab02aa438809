"""Registers the models of a launcher with an SMG gateway, so that models on several machines have one address.

The gateway routes by model among its registered workers. Each model is one worker: the HTTP front-end of this launcher
below `/only/NAME`. The gateway's list is read each time, so that a restarted gateway gets the models again.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("zmqengine.launcher")

LOOK_S = 2.0
ANSWER_S = 5.0
ADDING_S = 60.0
"""Seconds between two attempts. SMG 1.13 lists a worker after a check of its health, and repeats a failed check after
30 s."""


class GatewayRegistration:
    """This machine's models at one gateway.

    `base`: URL of the HTTP front-end for the gateway; `key`: the front-end's API key, if it has one.
    """

    def __init__(self, gateway: str, base: str, key: str = "") -> None:
        self._gateway = gateway.rstrip("/")
        self._base = base.rstrip("/")
        self._key = key
        self._failing = False
        self._given_s: dict[str, float] = {}

    async def keep(self, names: Iterable[str]) -> None:
        """Register exactly these models at the gateway. Repeats until the gateway answers."""
        try:
            await asyncio.to_thread(self._keep, set(names))
            if self._failing:
                log.info("the gateway answers again", extra={"gateway": self._gateway})
            self._failing = False
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            if not self._failing:
                log.warning(
                    "the gateway does not answer", extra={"gateway": self._gateway, "reason": str(error)}
                )
            self._failing = True

    def _keep(self, names: set[str]) -> None:
        if names and not self._is_served():
            # SMG would find it unhealthy, and check again only after a while.
            return
        wanted = {f"{self._base}/only/{name.replace('/', '--')}" for name in names}
        known = {
            worker["url"]: worker["id"]
            for worker in self._call("GET", "/workers")["workers"]
            if worker["url"].startswith(f"{self._base}/only/")
        }
        now_s = time.monotonic()
        for url in known:
            self._given_s.pop(url, None)
        for url in sorted(known.keys() - wanted):
            self._call("DELETE", f"/workers/{known[url]}")
            log.info("taken from the gateway", extra={"url": url})
        for url in sorted(wanted - known.keys()):
            if now_s < self._given_s.get(url, -ADDING_S) + ADDING_S:
                continue
            self._given_s[url] = now_s
            self._call("POST", "/workers", {"url": url} | ({"api_key": self._key} if self._key else {}))
            log.info("given to the gateway", extra={"url": url})

    def _is_served(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/health", timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._gateway + path, content, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 409:
                # It is being added or removed at this moment; the next attempt sees the result.
                return {}
            raise OSError(
                f"{method} {path}: {error.code} {error.read(200).decode(errors='replace')}"
            ) from None


def address_towards(gateway: str, host: str | None, port: int) -> str:
    """The URL at which a gateway reaches a front-end that listens on `host`."""
    if host in (None, "127.0.0.1", "localhost", "::1"):
        return f"http://127.0.0.1:{port}"
    if host not in ("0.0.0.0", "::"):
        return f"http://{host}:{port}"
    there = urlsplit(gateway)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system only chooses the interface.
        probe.connect((there.hostname or "127.0.0.1", there.port or 80))
        return f"http://{probe.getsockname()[0]}:{port}"
