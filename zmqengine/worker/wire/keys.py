"""CURVE key files. The format is that of ZeroMQ certificates, as `zmq.auth` and czmq read and write them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from zmqengine.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")

_PUBLIC = """\
#   ZeroMQ CURVE public certificate of {name}.
#   Give this file to the other side.

metadata
    name = "{name}"
curve
    public-key = "{public}"
"""

_SECRET = """\
#   ZeroMQ CURVE **secret** certificate of {name}.
#   DO NOT PROVIDE THIS FILE TO OTHER USERS nor change its permissions.

metadata
    name = "{name}"
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side's CURVE keys, each as 40 printable bytes (Z85)."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        # A traceback or a log line must not hold the secret.
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Paths of a new key pair: `public` is for the other side, `secret` is private."""

    public: Path
    secret: Path


def write_key_pair(directory: Path, name: str) -> KeyFiles:
    """Create a pair as `NAME.key` and, readable by its owner only, `NAME.key_secret`.

    Raises `ConfigError` if either exists, or the name or the directory is unusable. No file is overwritten, and a pair
    is written completely or not at all.
    """
    if not _NAME.match(name):
        raise ConfigError(f"{name!r} cannot name a key: use 1 to 64 letters, digits, '.', '_', '@' and '-'")
    files = KeyFiles(directory / f"{name}.key", directory / f"{name}.key_secret")
    for path in (files.public, files.secret):
        if path.exists():
            raise ConfigError(f"{path} exists already: move it away, or choose another name")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(files.secret, _SECRET.format(name=name, public=public, secret=secret), mode=0o600)
        try:
            _write_new(files.public, _PUBLIC.format(name=name, public=public), mode=0o644)
        except OSError:
            files.secret.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"cannot write keys to {directory}: {error.strerror}") from None
    return files


def load_key_pair(path: str | Path) -> KeyPair:
    """The pair in a `.key_secret` file.

    Raises `ConfigError` if it cannot be read, holds no secret key, or can be read by other users.
    """
    public, secret = _load(Path(path))
    if secret is None:
        raise ConfigError(f"{path} has no secret key: give the .key_secret file, not the .key file")
    if os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"other users can read the secret key in {path}: chmod 600 it")
    return KeyPair(public, secret)


def load_public_key(path: str | Path) -> bytes:
    """The public key in a `.key` or `.key_secret` file. Raises `ConfigError` if there is none."""
    return _load(Path(path))[0]


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror or 'no such file'}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a ZeroMQ certificate: make one with `zmqengine keygen`") from None
    for key in (public, secret):
        if key is not None and not is_key(key):
            raise ConfigError(f"{path} holds a damaged key: make one with `zmqengine keygen`")
    return public, secret


def is_key(key: bytes) -> bool:
    """Whether these are 32 bytes in Z85."""
    return len(key) == 40 and all(byte in _Z85 for byte in key)


_Z85 = frozenset(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)


def _write_new(path: Path, text: str, *, mode: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
