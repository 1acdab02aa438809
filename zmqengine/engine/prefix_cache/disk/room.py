"""How much a directory of block files may take, and which of them go for others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Bounds(NamedTuple):
    """Limits of a directory: bytes of all files, free bytes on the disk, bytes written a day."""

    bytes_max: int
    free_bytes_min: int
    written_bytes_max: int


class Refused(Exception):
    """A run that is not written. `reason` is one of `room`, `daily_writes` and `error`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Room:
    """Keeps the files in `path` whose names `may_go` within `bounds`. `bytes` is what all that is there took last, and
    `files` how many of those there were."""

    def __init__(self, path: Path, bounds: Bounds, may_go: Callable[[str], object]) -> None:
        self._path = path
        self._bounds = bounds
        self._may_go = may_go
        self.bytes = self.files = 0

    def make(self, bytes_: int, remove: Callable[[str], None]) -> None:
        """Have the least recently used files removed until there is room for so many bytes. Raises `Refused`,
        `OSError`."""
        found: list[tuple[int, str, int]] = []
        taken = 0
        for entry in os.scandir(self._path):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                taken += status.st_size
                if self._may_go(entry.name):
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
        disk = os.statvfs(self._path)
        free = disk.f_bavail * disk.f_frsize
        if bytes_ <= self._bounds.bytes_max:
            found.sort(reverse=True)
            while found and not self._fits(bytes_, taken, free):
                _, name, size = found.pop()
                remove(name)
                taken, free = taken - size, free + size
        self.bytes, self.files = taken, len(found)
        if not self._fits(bytes_, taken, free):
            raise Refused("room", f"{free} bytes are free on the disk, and {taken} are in use here")

    def _fits(self, bytes_: int, taken: int, free: int) -> bool:
        return taken + bytes_ <= self._bounds.bytes_max and free - bytes_ >= self._bounds.free_bytes_min
