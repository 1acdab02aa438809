"""Shares of this machine's memory, one for each worker, and of the time of its device.

Every live worker of a user has a file with its claim in one directory, locked for as long as its process lives. A
worker with a given memory limit claims that; the others divide the remainder without all weights in equal parts. So two
workers started without options never exceed the machine's memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

log = logging.getLogger("zmqengine.worker")

LOCK_WAIT_S = 1.0
"""Seconds to wait for the directory's lock: a process that holds it longer was stopped, and the lock is ignored."""


class Claim(msgspec.Struct, frozen=True):
    """One worker's claim. `limit_bytes` is None for an equal part of the remainder.

    `weights_bytes` are what it needs at least, as its launcher reckons, or its weights alone. `rows_decoding` is the
    worker's claim on the device's time.
    """

    name: str
    pid: int
    weights_bytes: int
    limit_bytes: int | None
    rows_decoding: int = 0


def share_of(mine: Claim, others: Sequence[Claim], total_bytes: int) -> int:
    """Bytes of `total_bytes` for `mine`, weights included; may be less than the weights, never negative."""
    if mine.limit_bytes is not None:
        return mine.limit_bytes
    sharing = [mine, *(other for other in others if other.limit_bytes is None)]
    fixed_bytes = sum(other.limit_bytes for other in others if other.limit_bytes is not None)
    left_bytes = total_bytes - fixed_bytes - sum(claim.weights_bytes for claim in sharing)
    return max(0, mine.weights_bytes + left_bytes // len(sharing))


class View(NamedTuple):
    """The present division of this machine's memory: this worker's limit, and a description of all claims.

    `is_too_much`: all limits together exceed the machine's memory, since one was set too high. `rows_decoding` counts
    the rows of the others.
    """

    limit_bytes: int
    description: str
    is_too_much: bool
    rows_decoding: int


def view_of(mine: Claim, others: Sequence[Claim], total_bytes: int) -> View:
    limit_bytes = share_of(mine, others, total_bytes)
    text = [f"{_gib(limit_bytes)} of {_gib(total_bytes)}"]
    for other in others:
        rest = [mine, *(claim for claim in others if claim is not other)]
        text.append(f"{other.name} (pid {other.pid}) has {_gib(share_of(other, rest, total_bytes))}")
    least = [claim.limit_bytes or claim.weights_bytes for claim in [mine, *others]]
    rows_decoding = sum(claim.rows_decoding for claim in others)
    return View(limit_bytes, "; ".join(text), sum(least) > total_bytes, rows_decoding)


class MemoryShare:
    """The claim of this process among those of all others. Creates a missing `directory`.

    Raises OSError where it cannot be created.
    """

    def __init__(self, directory: Path, name: str, limit_bytes: int | None) -> None:
        self._directory = directory
        self._claim = Claim(name, os.getpid(), 0, limit_bytes)
        self._least_bytes = self._total_bytes = 0
        self._path = directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._file = -1
        with self._locked(LOCK_WAIT_S):
            self._write()

    def claim(self, weights_bytes: int, total_bytes: int) -> View:
        """Claim memory for this worker's weights, or its least share if that is more, and divide `total_bytes`."""
        self._claim = msgspec.structs.replace(self._claim, weights_bytes=weights_bytes)
        self._least_bytes, self._total_bytes = weights_bytes, total_bytes
        with self._locked(LOCK_WAIT_S):
            self._write()
            return view_of(self._claim, self._others(), total_bytes)

    def look(self, rows_decoding: int = 0, weights_bytes: int = 0) -> View | None:
        """Publish the number of rows in decode, and weights that have become more than was claimed; return the present
        division.

        None if another worker has the lock, or the directory cannot be used. Rewrites the claim if its file is gone.
        Never waits and never raises.
        """
        try:
            with self._locked(0) as is_locked:
                if not is_locked:
                    return None
                weights_bytes = max(weights_bytes, self._least_bytes)
                claim = msgspec.structs.replace(
                    self._claim, rows_decoding=rows_decoding, weights_bytes=weights_bytes
                )
                if claim != self._claim or not self._path.exists():
                    self._claim = claim
                    self._write()
                return view_of(self._claim, self._others(), self._total_bytes)
        except OSError:
            return None

    def touch(self) -> None:
        """Set the file times of the claim to now, so that cleaners of /tmp leave it alone."""
        for path in (self._directory, self._path):
            with contextlib.suppress(OSError):
                os.utime(path)

    def close(self) -> None:
        """Withdraw the claim. Idempotent; the end of the process does the same."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = -1

    def _others(self) -> list[Claim]:
        """The claims of the other live workers. Files of dead ones are removed."""
        claims = [_read_live(path) for path in sorted(self._directory.glob("*.json")) if path != self._path]
        return [claim for claim in claims if claim is not None]

    def _write(self) -> None:
        """Write the claim, into a file of the same name if the earlier one was removed."""
        if not self._path.exists():
            if self._file >= 0:
                os.close(self._file)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        # Written in place, without a rename: the lock is on this file.
        text = msgspec.json.encode(self._claim)
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    @contextlib.contextmanager
    def _locked(self, wait_s: float) -> Iterator[bool]:
        """Lock the directory: between a file's creation and its lock it would look like a dead process's file."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline_s = time.monotonic() + wait_s
            while not (is_locked := _try_lock(lock)) and time.monotonic() < deadline_s:
                time.sleep(0.005)
            if wait_s and not is_locked:
                log.warning(
                    "the lock on the memory claims has been held for too long",
                    extra={"path": self._directory},
                )
            yield is_locked
        finally:
            os.close(lock)


def live_claims(directory: Path) -> list[Claim]:
    """The claims of all live workers, for a process without a claim. Raises OSError without the directory."""
    # Without the directory's lock no file is removed: a new one may not be locked yet.
    claims = [_read_live(path, remove=False) for path in sorted(directory.glob("*.json"))]
    return [claim for claim in claims if claim is not None]


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _read_live(path: Path, *, remove: bool = True) -> Claim | None:
    """The claim in `path`; None if its process has ended. `remove`: delete the file then."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(file):
            if remove:
                path.unlink(missing_ok=True)
            return None
        return msgspec.json.decode(os.pread(file, 65_536, 0), type=Claim)
    except msgspec.DecodeError:
        return None
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
