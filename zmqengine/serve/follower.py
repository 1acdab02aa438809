"""Follower of one worker: its process, its progress while it loads, its requests once it is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.messages import ADAPTER_FACT, Description, Status
from zmqengine.serve.child import Child
from zmqengine_client import AsyncClient
from zmqengine_client.pause import Pause

log = logging.getLogger("zmqengine.launcher")

LOADING_EVERY_S = 0.2
READY_EVERY_S = 1.0
ENDED_EVERY_S = 0.1
"""Seconds between two checks of the process."""
ANSWER_S = 5.0
HELD = ("weights", "kv", "padding", "parked", "workspace")
"""Kinds of memory that cannot be released for others, unlike the prefix cache and buffers."""


class Followed(Protocol):
    """Receiver of one worker's events; `name` is that of its model."""

    def described(self, name: str, description: Description) -> None:
        """Progress of its start."""

    def told(self, name: str, requests: int, asked_s: float, held_bytes: int, adapters: list[str]) -> None:
        """Its running requests, bytes in use, and adapters, each as NAME=DIR."""

    def ended(self, name: str) -> None:
        """End of its process."""


class Follower:
    """Follows one worker until its process ends."""

    def __init__(self, child: Child, followed: Followed) -> None:
        self.child = child
        self.name = child.record.name
        self._followed = followed
        self._pause = Pause()
        self._client: AsyncClient | None = None
        self._asking = asyncio.create_task(self._ask())
        self._waiting = asyncio.create_task(self._wait())

    def look_now(self) -> None:
        """Request the status at once."""
        self._pause.end()

    async def close(self) -> None:
        """Stop following. The process continues."""
        for task in (self._asking, self._waiting):
            task.cancel()
        await asyncio.gather(self._asking, self._waiting, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _wait(self) -> None:
        while not self.child.has_ended():
            await asyncio.sleep(ENDED_EVERY_S)
        self._asking.cancel()
        self._followed.ended(self.name)

    async def _ask(self) -> None:
        client = self._client = AsyncClient(
            self.child.record.address, name="launcher", connect_timeout_s=ANSWER_S, answer_timeout_s=ANSWER_S
        )
        is_ready = False
        while True:
            asked_s = time.monotonic()
            try:
                if not is_ready:
                    description = await client.describe()
                    is_ready = description.state in ("ready", "draining")
                    self._followed.described(self.name, description)
                if is_ready:
                    status = await client.status()
                    self._followed.told(
                        self.name, _requests(status), asked_s, _held_bytes(status), _adapters(status)
                    )
            except ZmqEngineError:
                # Not listening yet, or too busy: the check of its process decides whether it lives.
                pass
            except Exception:
                log.exception("following a worker failed", extra={"model": self.name})
            await self._pause.last(READY_EVERY_S if is_ready else LOADING_EVERY_S)


def _requests(status: Status) -> int:
    return int(status.numbers.get("running", 0) + status.numbers.get("queued", 0))


def _held_bytes(status: Status) -> int:
    return sum(status.memory.get(part, 0) for part in HELD)


def _adapters(status: Status) -> list[str]:
    return [
        f"{name.removeprefix(ADAPTER_FACT)}={directory}"
        for name, directory in status.facts.items()
        if name.startswith(ADAPTER_FACT)
    ]
