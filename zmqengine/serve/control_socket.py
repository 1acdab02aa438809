"""The launcher's socket: peers, their tickets, and replies. SPEC.md, "The launcher's socket"."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.codec import encode, read_addressee
from zmqengine.protocol.launcher import (
    FreeModel,
    LauncherBeat,
    LauncherReply,
    LauncherRequest,
    ListModels,
    LoadModel,
    ModelAddress,
    ModelChanges,
    ModelEntry,
    ModelList,
    ReloadList,
    UnloadModel,
    WantModel,
    WatchModels,
    launcher_decoder,
)
from zmqengine.protocol.messages import Done, Ping, Rejected
from zmqengine.worker.wire.socket_files import SocketFiles
from zmqengine_client.loop_socket import LoopSocket

log = logging.getLogger("zmqengine.launcher")

REQUEST_BYTES_MAX = 65_536
LINGER_MS = 100
OPTIONS = {zmq.ROUTER_MANDATORY: 1, zmq.MAXMSGSIZE: REQUEST_BYTES_MAX, zmq.SNDHWM: 1_000}
"""Maximum replies queued for one connection: with a beat a second, a stopped peer is dropped after 17 minutes."""


class Answering(Protocol):
    """Decides the answers to requests of the socket."""

    def list_models(self, call: int) -> ModelList:
        """Answer to a `ListModels`."""

    def entries(self) -> list[ModelEntry]:
        """Entries of all models."""

    def want(self, ticket: int, model: str, keep_alive_s: float | None) -> None:
        """Ask for a model for a request; the socket's `grant` or `refuse` answers later. Raises the error of an
        immediate refusal."""

    def free(self, ticket: int) -> None:
        """Note the end of the request."""

    def load(self, model: str, keep_alive_s: float | None) -> None:
        """Load a model. Raises the error of a refusal."""

    def unload(self, model: str) -> None:
        """Unload a model. Raises the error of a refusal."""

    async def reload(self) -> None:
        """Read the list of models again. Raises an error in the new list."""


@dataclass(slots=True)
class _Peer:
    """One connection. `tickets`: tickets of models that it waits for or holds, by call."""

    route: bytes
    tickets: dict[int, int] = field(default_factory=dict)
    watching: int | None = None


class ControlSocket:
    """Serves one address from `open` on. Raises `ConfigError` if another launcher has it."""

    def __init__(self, directory: Path, answering: Answering) -> None:
        self.epoch = os.urandom(8)
        self._answering = answering
        self._path = directory / "ctl"
        self._files = SocketFiles(
            directory, "a launcher is already running at {}: zmqengine status shows its models"
        )
        self._socket = LoopSocket(zmq.ROUTER, self._receive)
        for option, value in OPTIONS.items():
            self._socket.socket.setsockopt(option, value)
        self._decoder = launcher_decoder()
        self._peers: dict[bytes, _Peer] = {}
        self._calls: dict[int, tuple[bytes, int]] = {}
        """Route and call of each ticket."""
        self._granted: dict[int, tuple[str, str]] = {}
        self._tickets = itertools.count()
        self._known: dict[str, ModelEntry] = {}
        self._reloading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Answer peers from now on."""
        earlier_umask = os.umask(0o177)
        try:
            self._socket.socket.bind(f"ipc://{self._path}")
        finally:
            os.umask(earlier_umask)

    def close(self) -> None:
        """Close the socket. Peers keep their models while the workers live."""
        self._socket.close(LINGER_MS)
        self._files.release()

    def keep_files(self, *, touch: bool) -> None:
        """Restore the socket's file if it was removed; with `touch`, update its times, so that cleaners of /tmp leave
        it alone."""
        self._files.keep(self._socket.socket, self._path)
        if touch:
            self._files.touch()

    # --- from the launcher ---------------------------------------------------------------------------------

    def grant(self, ticket: int, model: str, address: str) -> None:
        """Tell a request that its model is ready, at `address`."""
        if ticket in self._calls:
            self._granted[ticket] = model, address
            self._say_granted(ticket)

    def refuse(self, ticket: int, error: ZmqEngineError) -> None:
        """Tell a request that it cannot have its model, or has it no more."""
        if ticket in self._calls:
            route, call = self._calls.pop(ticket)
            self._granted.pop(ticket, None)
            peer = self._peers[route]
            peer.tickets.pop(call, None)
            self._leave(peer)
            self._send(route, self._rejection(call, error))

    def beat(self, progress: Callable[[int, int], LauncherReply | None]) -> None:
        """Send a sign of life to every peer that waits for or holds a model, with the `progress` of its tickets.

        This detects ended connections, whose tickets are released.
        """
        for peer in list(self._peers.values()):
            if peer.tickets or peer.watching is not None:
                self._send(peer.route, LauncherBeat(self.epoch))
            for call, ticket in list(peer.tickets.items()):
                if ticket not in self._granted and (message := progress(ticket, call)) is not None:
                    self._send(peer.route, message)

    def tell_changes(self) -> None:
        """Send the changes since the last call to watching peers."""
        now = {entry.name: entry for entry in self._answering.entries()}
        changed = [entry for name, entry in now.items() if self._known.get(name) != entry]
        gone = [name for name in self._known if name not in now]
        self._known = now
        if changed or gone:
            for peer in list(self._peers.values()):
                if peer.watching is not None:
                    self._send(peer.route, ModelChanges(peer.watching, self.epoch, changed, gone))

    # --- from the peers ------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes]) -> None:
        route, parts = frames[0], frames[1:]
        call = read_addressee(parts[1]).call if len(parts) == 2 else 0
        try:
            self._handle(route, self._decoder.decode(parts))
        except ZmqEngineError as error:
            self._send(route, self._rejection(call, error))
        except Exception as error:
            log.exception("a request failed", extra={"call": call})
            self._send(route, Rejected(call, self.epoch, "internal", f"the launcher failed: {error}"))

    def _handle(self, route: bytes, request: LauncherRequest) -> None:
        answering, done = self._answering, Done(request.call, self.epoch)
        match request:
            case ListModels():
                self._send(route, answering.list_models(request.call))
            case WantModel():
                self._want(route, request)
            case FreeModel():
                self._free(route, request.wanted)
            case LoadModel():
                answering.load(request.model, request.keep_alive_s)
                self._send(route, done)
            case UnloadModel():
                answering.unload(request.model)
                self._send(route, done)
            case WatchModels():
                self._peers.setdefault(route, _Peer(route)).watching = request.call
                self._send(route, ModelChanges(request.call, self.epoch, answering.entries()))
            case ReloadList():
                self._reloading = asyncio.create_task(self._reload(route, request.call))
            case Ping():
                self._send(route, done)

    async def _reload(self, route: bytes, call: int) -> None:
        try:
            await self._answering.reload()
            self._send(route, Done(call, self.epoch))
        except ZmqEngineError as error:
            self._send(route, self._rejection(call, error))

    def _want(self, route: bytes, request: WantModel) -> None:
        peer = self._peers.setdefault(route, _Peer(route))
        known = peer.tickets.get(request.call)
        if known is not None:
            # A repetition, because the answer was lost.
            if known in self._granted:
                self._say_granted(known)
            return
        ticket = next(self._tickets)
        peer.tickets[request.call] = ticket
        self._calls[ticket] = route, request.call
        try:
            self._answering.want(ticket, request.model, request.keep_alive_s)
        except ZmqEngineError as error:
            self.refuse(ticket, error)

    def _free(self, route: bytes, wanted: int) -> None:
        peer = self._peers.get(route)
        if peer is None:
            return
        if peer.watching == wanted:
            peer.watching = None
        ticket = peer.tickets.pop(wanted, None)
        if ticket is not None:
            self._forget(ticket)
        self._leave(peer)

    def _leave(self, peer: _Peer) -> None:
        """Drop a peer without tickets: nothing is sent to it, so its end would not be detected."""
        if not peer.tickets and peer.watching is None:
            self._peers.pop(peer.route, None)

    def _forget(self, ticket: int) -> None:
        self._calls.pop(ticket, None)
        self._granted.pop(ticket, None)
        self._answering.free(ticket)

    def _say_granted(self, ticket: int) -> None:
        route, call = self._calls[ticket]
        model, address = self._granted[ticket]
        self._send(route, ModelAddress(call, self.epoch, model, address))

    def _rejection(self, call: int, error: ZmqEngineError) -> Rejected:
        return Rejected(call, self.epoch, error.code, error.message, retry_after_ms=error.retry_after_ms)

    def _send(self, route: bytes, message: LauncherReply) -> None:
        try:
            self._socket.send([route, *encode(message)])
        except zmq.ZMQError:
            self._drop(route)

    def _drop(self, route: bytes) -> None:
        peer = self._peers.pop(route, None)
        if peer is not None:
            for ticket in peer.tickets.values():
                self._forget(ticket)
