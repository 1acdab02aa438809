"""CURVE keys of a front-end: its own pair and the worker's public key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth

from zmqengine.errors import ConfigError

CLIENT_KEY_VARIABLE = "ZMQENGINE_CLIENT_KEY"
SERVER_KEY_VARIABLE = "ZMQENGINE_SERVER_KEY"
Z85_KEY_CHARS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The front-end's own key pair and the worker's public key, each as 40 characters of Z85."""

    public_key: bytes
    secret_key: bytes
    server_key: bytes

    def __post_init__(self) -> None:
        for name in ("public_key", "secret_key", "server_key"):
            if len(getattr(self, name)) != Z85_KEY_CHARS:
                raise ConfigError(f"{name} is not a key: it must have {Z85_KEY_CHARS} characters of Z85")

    def __repr__(self) -> str:
        return f"CurveKeys(public_key={self.public_key!r}, server_key={self.server_key!r})"

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Make an unconnected socket use the keys."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)


def load_keys(client_key: str | Path, server_key: str | Path) -> CurveKeys:
    """Keys from files written by `zmqengine keygen`.

    `client_key` is the front-end's secret file (`NAME.key_secret`), `server_key` the worker's public file or the key
    itself. Raises `ConfigError`, naming the file.
    """
    public, secret = _certificate(Path(client_key))
    if secret is None:
        raise ConfigError(f"{client_key} has no secret key: give the file that ends in .key_secret")
    if Path(client_key).stat().st_mode & 0o077:
        raise ConfigError(f"other users can read the secret key in {client_key}: chmod 600 it")
    text = str(server_key)
    if len(text) == Z85_KEY_CHARS and not Path(text).exists():
        return CurveKeys(public, secret, text.encode())
    return CurveKeys(public, secret, _certificate(Path(text))[0])


def keys_from_environment() -> CurveKeys | None:
    """Keys from `$ZMQENGINE_CLIENT_KEY` (a file) and `$ZMQENGINE_SERVER_KEY` (a file or the key), or None.

    Raises `ConfigError` if only one is set.
    """
    client_key, server_key = os.environ.get(CLIENT_KEY_VARIABLE), os.environ.get(SERVER_KEY_VARIABLE)
    if not client_key and not server_key:
        return None
    if not client_key or not server_key:
        raise ConfigError(f"${CLIENT_KEY_VARIABLE} and ${SERVER_KEY_VARIABLE} belong together: set both")
    return load_keys(client_key, server_key)


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key file {path}: {error}") from None
    return public, secret
