"""How much was written to a directory today, by all who share it. A disk bears only so many writes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "written-"
_RECORD_BYTES = 8


class DailyWrites:
    """Bytes written since midnight UTC: a file of 8-byte records to which every writer appends.

    Small appends do not mix, so no lock is needed; a record that is torn counts as nothing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def today(self) -> int:
        """The sum so far. Raises `OSError`."""
        try:
            records = self._path().read_bytes()
        except FileNotFoundError:
            return 0
        ends = range(_RECORD_BYTES, len(records) + 1, _RECORD_BYTES)
        return sum(int.from_bytes(records[end - _RECORD_BYTES : end], "little") for end in ends)

    def add(self, bytes_: int) -> None:
        """Count what was written. Raises `OSError`."""
        descriptor = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, bytes_.to_bytes(_RECORD_BYTES, "little"))
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Remove what was counted on earlier days."""
        today = self._path().name
        for path in self._directory.glob(f"{_PREFIX}*"):
            if path.name < today:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self) -> Path:
        return self._directory / time.strftime(f"{_PREFIX}%Y-%m-%d", time.gmtime())
