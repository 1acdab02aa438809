"""Measured memory of models, saved for later launchers."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from zmqengine.paths import cache_directory, replace_file

log = logging.getLogger("zmqengine.launcher")

ENTRIES_MAX = 1000


class MeasuredMemory:
    """Bytes by the signature of a worker's options. A file that cannot be read or written counts as empty."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_directory() / "serve" / "measured.json"
        self._bytes: dict[str, int] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._bytes = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])

    def of(self, signature: str) -> int:
        """Bytes of a worker with these options; 0 if it was never loaded."""
        return self._bytes.get(signature, 0)

    def keep(self, signature: str, size: int) -> None:
        """Save the bytes of a worker with these options."""
        if not size or self._bytes.get(signature) == size:
            return
        self._bytes.pop(signature, None)
        self._bytes[signature] = size
        while len(self._bytes) > ENTRIES_MAX:
            del self._bytes[next(iter(self._bytes))]
        try:
            replace_file(self._path, msgspec.json.encode(self._bytes))
        except OSError as error:
            log.info("measured memory cannot be saved", extra={"reason": str(error)})
