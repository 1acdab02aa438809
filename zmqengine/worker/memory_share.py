"""What each worker on this machine may hold of its memory.

Every live worker of a user has a file in one directory, locked for as long as its process lives, that says what it
claims. A worker whose memory limit was given claims just that; the others share what is left beside all weights in
equal parts. So two workers that were started without any option never hold more than the machine has.
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

import msgspec

log = logging.getLogger("zmqengine.worker")

LOCK_WAIT_S = 1.0
"""Then we go on without: whoever holds the directory's lock for so long was stopped."""


class Claim(msgspec.Struct, frozen=True):
    """What one worker claims. `limit_bytes` is None for an equal part of what is left."""

    name: str
    pid: int
    weights_bytes: int
    limit_bytes: int | None


def share_of(mine: Claim, others: Sequence[Claim], total_bytes: int) -> int:
    """What `mine` may hold of `total_bytes`, its weights included. It may be less than they are, but not negative."""
    if mine.limit_bytes is not None:
        return mine.limit_bytes
    sharing = [mine, *(other for other in others if other.limit_bytes is None)]
    fixed_bytes = sum(other.limit_bytes for other in others if other.limit_bytes is not None)
    left_bytes = total_bytes - fixed_bytes - sum(claim.weights_bytes for claim in sharing)
    return max(0, mine.weights_bytes + left_bytes // len(sharing))


class MemoryShare:
    """The claim of this process, and the view of all others. `directory` is made if it is not there."""

    def __init__(self, directory: Path, name: str, limit_bytes: int | None) -> None:
        self._directory = directory
        self._claim = Claim(name, os.getpid(), 0, limit_bytes)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        with self._locked():
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write()

    def claim_weights(self, weights_bytes: int) -> None:
        """Say how large this worker's model is, now that it is known."""
        self._claim = msgspec.structs.replace(self._claim, weights_bytes=weights_bytes)
        with self._locked():
            self._write()

    def limit_bytes(self, total_bytes: int) -> int:
        """What this worker may hold of `total_bytes`, as things are now."""
        return share_of(self._claim, self.others(), total_bytes)

    def told(self, total_bytes: int) -> str:
        """The same for people: who holds what, this worker first."""
        others = self.others()
        told = [f"{_gib(share_of(self._claim, others, total_bytes))} of {_gib(total_bytes)}"]
        for other in others:
            rest = [self._claim, *(claim for claim in others if claim is not other)]
            told.append(f"{other.name} (pid {other.pid}) has {_gib(share_of(other, rest, total_bytes))}")
        return "; ".join(told)

    def is_oversubscribed(self, total_bytes: int) -> bool:
        """Whether all workers together may hold more than there is: somebody was given too high a limit."""
        claims = [self._claim, *self.others()]
        fixed_bytes = sum(
            claim.weights_bytes if claim.limit_bytes is None else claim.limit_bytes for claim in claims
        )
        return fixed_bytes > total_bytes

    def others(self) -> list[Claim]:
        """The claims of the other live workers. Files of dead ones are removed."""
        with self._locked():
            paths = sorted(self._directory.glob("*.json"))
            found = [_read_live(path) for path in paths if path != self._path]
        return [claim for claim in found if claim is not None]

    def close(self) -> None:
        """Withdraw the claim. Idempotent; the end of the process does the same."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _write(self) -> None:
        # In place and not by a rename: the lock is on this file.
        text = msgspec.json.encode(self._claim)
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Between a file's creation and its lock it would look like one of a dead process."""
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline_s = time.monotonic() + LOCK_WAIT_S
            while not _try_lock(lock):
                if time.monotonic() > deadline_s:
                    log.warning(
                        "the lock on the memory claims is held for too long", extra={"path": self._directory}
                    )
                    break
                time.sleep(0.005)
            yield
        finally:
            os.close(lock)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _read_live(path: Path) -> Claim | None:
    """The claim in `path`; None, and the file is gone, if the process that made it is."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _try_lock(file):
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
