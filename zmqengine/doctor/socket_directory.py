"""Findings of the directory of named workers: paths, permissions, stale sockets of dead workers."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from zmqengine.doctor.finding import Finding
from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import DEFAULT_NAME, base_directory, is_listened_to, resolve


def look_at_sockets() -> Iterator[Finding]:
    """Look at the directory of named workers, and at each worker in it."""
    base = base_directory()
    try:
        resolve(DEFAULT_NAME)
    except ConfigError as error:
        yield Finding("fail", "sockets", str(error), "set $ZMQENGINE_DIR to a shorter path")
        return
    if not base.exists():
        yield Finding("ok", "sockets", f"{base} is made by the first worker")
        return
    yield from _directory(base)
    if not base.is_dir() or not os.access(base, os.R_OK | os.X_OK):
        return
    for directory in sorted(path for path in base.iterdir() if path.is_dir()):
        yield from _worker(directory)


def _directory(base: Path) -> Iterator[Finding]:
    facts = base.stat()
    if not stat.S_ISDIR(facts.st_mode):
        yield Finding("fail", "sockets", f"{base} is not a directory", "remove it, or set $ZMQENGINE_DIR")
    elif facts.st_uid != os.getuid():
        yield Finding(
            "fail", "sockets", f"{base} belongs to another user", "set $ZMQENGINE_DIR to a directory of yours"
        )
    elif facts.st_mode & 0o077 and _holds_open_workers(base):
        text = f"other users may look into {base} and into a worker in it"
        yield Finding("fail", "sockets", text, f"chmod 700 {base}")
    elif not os.access(base, os.W_OK | os.X_OK):
        yield Finding("fail", "sockets", f"nothing can be made in {base}", f"chmod 700 {base}")
    else:
        yield Finding("ok", "sockets", f"{base}")


def _holds_open_workers(base: Path) -> bool:
    return any(path.stat().st_mode & 0o077 for path in base.iterdir() if path.is_dir())


def _worker(directory: Path) -> Iterator[Finding]:
    sockets = [directory / name for name in ("ctl", "cmd", "out") if (directory / name).is_socket()]
    if sockets and not any(is_listened_to(path) for path in sockets):
        yield Finding(
            "warn",
            "stale sockets",
            f"a worker {directory.name!r} ended and left its sockets in {directory}",
            f"start it again, or: rm -r {directory}",
        )
