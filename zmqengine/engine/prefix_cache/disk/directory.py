"""The directory of block files: what is in it, and how much may be.

Workers of any model may share one. Nobody locks: a file appears complete by its rename, is never changed, and may be
gone at any time. How recently one was used is its time of modification, which all of them see.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zmqengine.engine.prefix_cache.disk.block_file import encode, read_blocks, read_header, write_file
from zmqengine.engine.prefix_cache.disk.block_header import BadFile, Fault
from zmqengine.engine.prefix_cache.disk.daily_writes import DailyWrites
from zmqengine.engine.prefix_cache.disk.file_index import FileIndex, Place
from zmqengine.engine.prefix_cache.disk.host_block import HostBlock
from zmqengine.engine.prefix_cache.disk.own_directory import own_directory
from zmqengine.engine.prefix_cache.disk.room import Bounds, Refused, Room

log = logging.getLogger("zmqengine.engine")

ABANDONED_S = 60.0
"""A file that nobody has gone on writing for so long belonged to a process that was killed."""
_TICK_NS = 100_000_000
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{16}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f-]+\.[0-9]+\.part")


@dataclass(slots=True)
class Totals:
    """Contents of the directory, and events since this worker began. `written_today` is of all that share it."""

    bytes: int = 0
    files: int = 0
    written_today: int = 0
    written_blocks: int = 0
    read_blocks: int = 0
    removed_files: int = 0


class Directory:
    """Blocks with one salt, in `path`, which is made for this user alone. May be used from any thread.

    Raises `ConfigError` when `path` cannot be used. Files that are torn, or hold not what their name says, are
    skipped, told of once, and removed by `tidy`; those of a newer version only when they are the least recently used.
    """

    def __init__(self, path: Path, salt: bytes, bounds: Bounds) -> None:
        self.path = own_directory(path)
        self.totals = Totals()
        self.faults: Counter[Fault] = Counter()
        self._salt = salt
        self._prefix = salt.hex()[:16]
        self._bounds = bounds
        self._room = Room(self.path, bounds, _NAME.fullmatch)
        self._daily = DailyWrites(self.path)
        self._lock = threading.Lock()
        self._index = FileIndex()
        self._bad: dict[str, Fault] = {}
        self._looked_ns = -1
        self._unfinished = 0

    def __len__(self) -> int:
        return len(self._index)

    def find(self, key: bytes) -> Place | None:
        """Location of this block, if known. Never waits."""
        return self._index.find(key)

    def following(self, parent_key: bytes) -> dict[bytes, int]:
        """The blocks after this one, and how many tokens they have; the longest first."""
        with self._lock:
            return self._index.following(parent_key)

    def largest_file(self) -> list[bytes]:
        """The keys of the blocks in the largest file there is; empty when there is none."""
        with self._lock:
            return self._index.largest_file()

    def look(self) -> None:
        """Notice what others have written or removed. Cheap when they have not."""
        with contextlib.suppress(OSError), self._lock:
            changed_ns = self.path.stat().st_mtime_ns
            if changed_ns == self._looked_ns:
                return
            # A change in the same tick of the clock would not be noticed later.
            self._looked_ns = changed_ns if time.time_ns() - changed_ns > _TICK_NS else -1
            names = {name for name in os.listdir(self.path) if _NAME.fullmatch(name)}
            for gone in self._index.names - names:
                self._index.drop(gone)
            self._bad = {name: fault for name, fault in self._bad.items() if name in names}
            for name in names - self._index.names - self._bad.keys():
                if name.startswith(self._prefix):
                    self._take_in(name)

    def read(self, keys: Sequence[bytes]) -> list[HostBlock]:
        """The blocks of `keys`, each the parent of the next, as far as they are there and whole."""
        blocks: list[HostBlock] = []
        used: list[str] = []
        while len(blocks) < len(keys):
            with self._lock:
                run = self._index.run(keys[len(blocks) :])
            if run is None:
                break
            name, wanted = run
            try:
                blocks += read_blocks(self.path / name, self._salt, wanted)
            except BadFile as error:
                with self._lock:
                    self._index.drop(name)
                    self._condemn(name, error)
                break
            except OSError:
                # Another worker needed the room.
                with self._lock:
                    self._index.drop(name)
                break
            used.append(name)
        # The first file last: without it nobody finds the others.
        for name in reversed(used):
            with contextlib.suppress(OSError):
                os.utime(self.path / name)
        self.totals.read_blocks += len(blocks)
        return blocks

    def write(self, blocks: Sequence[HostBlock]) -> int:
        """Keep a run of blocks, each the parent of the next, in one file; returns its bytes. Raises `Refused`."""
        name = f"{self._prefix}-{blocks[0].key.hex()[:32]}-{blocks[-1].key.hex()[:16]}.safetensors"
        parts = encode(self._salt, blocks)
        written = sum(map(len, parts))
        self._unfinished += 1
        unfinished = (
            self.path / f".{name.removesuffix('.safetensors')}-{os.getpid():x}.{self._unfinished}.part"
        )
        try:
            if self._daily.today() + written > self._bounds.written_bytes_max:
                raise Refused("daily_writes", "as much has been written today as is allowed")
            self._make_room(written)
            write_file(unfinished, parts)
            self._daily.add(written)
            os.rename(unfinished, self.path / name)
        except OSError as error:
            raise Refused("error", str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        self._sync()
        with self._lock:
            self._index.add_blocks(name, blocks)
        self.totals.written_blocks += len(blocks)
        return written

    def tidy(self) -> None:
        """Remove what is of no use, and keep to the bounds; count what there is. Raises no `OSError`."""
        with contextlib.suppress(OSError):
            self.look()
            with self._lock:
                bad = [name for name, fault in self._bad.items() if fault != "newer"]
            for name in bad:
                self._remove(name)
            now_s = time.time()
            for path in self.path.iterdir():
                if _UNFINISHED.fullmatch(path.name) and now_s - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()
            self._daily.forget()
            with contextlib.suppress(Refused):
                self._make_room(0)
            self.totals.written_today = self._daily.today()

    # --- what is there; with the lock ---

    def _take_in(self, name: str) -> None:
        try:
            header = read_header(self.path / name)
            if header.salt != self._salt:
                raise BadFile("foreign", "it belongs to another model")
        except BadFile as error:
            self._condemn(name, error)
        except OSError as error:
            log.debug("a cached prompt is gone", extra={"file": name, "reason": str(error)})
        else:
            self._index.add_header(name, header)

    def _condemn(self, name: str, error: BadFile) -> None:
        self.faults[error.fault] += 1
        self._bad[name] = error.fault
        level = logging.WARNING if self.faults[error.fault] == 1 else logging.DEBUG
        log.log(level, "a file of cached prompts is skipped", extra={"file": name, "reason": str(error)})

    # --- room ---

    def _make_room(self, bytes_: int) -> None:
        try:
            self._room.make(bytes_, self._remove)
        finally:
            self.totals.bytes, self.totals.files = self._room.bytes, self._room.files

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)
            self.totals.removed_files += 1
        with self._lock:
            self._index.drop(name)
            self._bad.pop(name, None)

    def _sync(self) -> None:
        # The name is on the disk as well, not only what it stands for.
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
