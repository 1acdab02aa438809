"""Authentication: CURVE on the worker's sockets, and the ZAP handler that decides on each connection.

ZAP is ZeroMQ RFC 27. The handler fails closed: without its answer, no connection is accepted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import zmq
from zmq.utils import z85

from zmqengine.config import WorkerConfig
from zmqengine.errors import ConfigError
from zmqengine.worker.wire.keys import KeyPair, load_key_pair, load_public_key

log = logging.getLogger("zmqengine.auth")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"zmqengine"


def open_guard(config: WorkerConfig, context: zmq.Context[Any]) -> Guard | None:
    """The guard for the options, opened before any socket of the context is bound; None without keys.

    Raises `ConfigError` when a key file or directory cannot be used.
    """
    if config.server_key is None or config.authorized_keys is None:
        return None
    keys = load_key_pair(config.server_key)
    return Guard(context, keys, config.authorized_keys, config.operator_keys)


def key_check(config: WorkerConfig) -> Callable[[str], bool]:
    """A function that tells whether the key of a session is still known; for one thread, which is not the guard's."""
    if config.server_key is None or config.authorized_keys is None:
        return lambda user: True
    paths = (config.authorized_keys, config.operator_keys)
    directories = [KeyDirectory(Path(path)) for path in paths if path is not None]
    return lambda user: any(directory.has(user.encode()) for directory in directories)


class Guard:
    """Guard of a worker's sockets: answers libzmq's question whether a key may connect.

    Created before the sockets that it guards are bound. The keys are the `*.key` files of one or two directories,
    operators' keys among the accepted ones. An added or removed file counts from the next connection on;
    sessions of a removed key are ended by the timers. `User-Id` of a connection's frames is its public key in Z85,
    which no other peer can have.

    One thread serves it: `fileno` for its poller, `check` when that is readable.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        keys: KeyPair,
        authorized: str | Path,
        operators: str | Path | None = None,
    ) -> None:
        self._keys = keys
        self._authorized = KeyDirectory(Path(authorized))
        self._operators = None if operators is None else KeyDirectory(Path(operators))
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.bind(ZAP_ADDRESS)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only CURVE connections with a known key on this socket. Called before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without this, libzmq accepts every connection while no handler is bound.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def fileno(self) -> int:
        """Readable when there may be something to `check`."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def check(self) -> None:
        """Answer all waiting questions."""
        # The descriptor signals changes, not a state: all questions must be read.
        while cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            question = self._socket.recv_multipart()
            try:
                answer = self._answer(question)
            except Exception as error:
                # Without an answer this socket would read no further question, and no peer could connect.
                log.error("the key check failed", exc_info=error)
                answer = [ZAP_VERSION, (*question, b"", b"")[1], b"500", b"internal error", b"", b""]
            self._socket.send_multipart(answer)

    def is_known(self, user: str) -> bool:
        """Whether the `User-Id` is still a known key: a connection outlives the file of its key."""
        return self._is_known(user.encode())

    def is_operator(self, user: str) -> bool:
        """Whether the `User-Id` is an operator's key; False without a directory of operators."""
        return self._operators is not None and self._operators.has(user.encode())

    def close(self) -> None:
        """Accept no further connection. Idempotent; called before the context is terminated."""
        self._socket.close(0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, call = (*question, b"", b"")[:2]
        if version != ZAP_VERSION or len(question) < 6:
            return [ZAP_VERSION, call, b"500", b"malformed question", b"", b""]
        domain, peer, mechanism = question[2], question[3], question[5]
        # Only for the worker's own sockets: other domains of the context are refused.
        if domain != ZAP_DOMAIN or mechanism != b"CURVE" or len(question) != 7 or len(question[6]) != 32:
            return [ZAP_VERSION, call, b"400", b"not a CURVE connection", b"", b""]
        key = z85.encode(question[6])
        if self._is_known(key):
            return [ZAP_VERSION, call, b"200", b"OK", key, b""]
        log.warning("stranger refused", extra={"peer": peer.decode("ascii", "replace"), "key": key.decode()})
        return [ZAP_VERSION, call, b"400", b"this key is not authorized", b"", b""]

    def _is_known(self, key: bytes) -> bool:
        return self._authorized.has(key) or (self._operators is not None and self._operators.has(key))


class KeyDirectory:
    """The public keys in the `*.key` files of a directory, as they are now.

    Raises `ConfigError` when the directory cannot be read at the start. Later, a file that is no key is left
    out and logged, and a directory that cannot be read has no keys.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: frozenset[bytes] = frozenset()
        self._seen: dict[str, tuple[int, int, int]] = {}
        try:
            self._load(self._look())
        except OSError as error:
            raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from None

    def has(self, key: bytes) -> bool:
        """Whether the key is in the directory now; files changed since the last call are read again."""
        try:
            seen = self._look()
        except OSError as error:
            log.error("no key is authorized: %s cannot be read", self._path, extra={"reason": str(error)})
            self._seen, self._keys = {}, frozenset()
            return False
        if seen != self._seen:
            self._load(seen)
        return key in self._keys

    def _look(self) -> dict[str, tuple[int, int, int]]:
        seen = {}
        for path in self._path.iterdir():
            # A file may be removed during the scan.
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == ".key":
                    status = path.stat()
                    seen[path.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return seen

    def _load(self, seen: dict[str, tuple[int, int, int]]) -> None:
        keys = set()
        for name in seen:
            try:
                keys.add(load_public_key(self._path / name))
            except ConfigError as error:
                log.warning("key left out: %s", error)
        self._seen, self._keys = seen, frozenset(keys)
        log.info("keys read", extra={"directory": str(self._path), "keys": len(keys)})
