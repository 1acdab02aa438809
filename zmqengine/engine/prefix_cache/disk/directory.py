"""Directory of block files, shared by workers of any model and kept within bounds.

Without locks: a file appears complete by a rename, is never changed, and may be removed at any time. Its modification
time is the time of its last use, visible to all workers.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zmqengine.engine.prefix_cache.disk.block_file import (
    BadFile,
    HostBlock,
    NewerFile,
    encode,
    read_blocks,
    read_header,
    write_file,
)
from zmqengine.engine.prefix_cache.disk.file_index import BlockLocation, FileIndex
from zmqengine.errors import ConfigError

log = logging.getLogger("zmqengine.engine")

SUBDIRECTORY = "prompts"
ABANDONED_S = 60.0
"""Age at which an unfinished file belongs to a process that was killed."""
LISTED_S = 60.0
"""Age at which the listing of files is renewed before a write. Workers that share a directory may exceed its bound by
what the others write meanwhile."""
# Nanoseconds within which a file system may give two changes the same time.
_TICK_NS = 100_000_000
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-[0-9a-f]{16}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f-]+\.[0-9]+\.part")
_DAY_S = 86_400
# Weight of the earlier value in the moving average of the disk's speed.
_RATE_KEPT = 0.7
# For fewer bytes the call itself, and a busy machine, dominate the time.
_MEASURED_BYTES_MIN = 1 << 20


class DiskBounds(NamedTuple):
    """Bounds of a directory: bytes of all files, free bytes on the disk, bytes that one worker writes in a day."""

    bytes_max: int
    free_bytes_min: int
    written_bytes_max: int


class _File(NamedTuple):
    used_ns: int
    name: str
    bytes: int


class Refused(Exception):
    """A run that was not written. `reason`: `room`, `daily_writes` or `error`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Rate:
    """Average of a speed in bytes per second; 0 until it was measured."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def note(self, bytes_: int, seconds: float) -> None:
        """Account for `bytes_` that took `seconds`."""
        if bytes_ >= _MEASURED_BYTES_MIN:
            speed = bytes_ / max(seconds, 1e-9)
            known = self.bytes_per_s or speed
            self.bytes_per_s = _RATE_KEPT * known + (1 - _RATE_KEPT) * speed

    def seconds(self, bytes_: int) -> float:
        """Estimated time for `bytes_`; 0 where nothing is known."""
        return bytes_ / self.bytes_per_s if self.bytes_per_s else 0.0


class Directory:
    """Block files with one salt, in a subdirectory of `path` that is made for this user alone.

    Any thread may use it. `find` and `following` never wait for the disk. A damaged file is
    skipped, logged and removed by `tidy`; one of a later version is only skipped, and evicted like others. `counts`:
    contents and events, for `status`. Raises `ConfigError` when `path` cannot be used.
    """

    def __init__(self, path: Path, salt: bytes, bounds: DiskBounds) -> None:
        self.path = _own_directory(path)
        self.read_rate = Rate()
        self.counts = Counter(
            bytes=0, files=0, written_today_bytes=0, written_blocks=0, read_blocks=0, removed_files=0,
            skipped_torn=0, skipped_newer=0,
        )  # fmt: skip
        self._salt = salt
        self._prefix = salt.hex()[:16]
        self._bounds = bounds
        self._unfinished = 0
        # Files as of the last listing and with what was written since, the least recently used first; the bytes of
        # all, with foreign ones; and the time of the listing. The writing thread's alone.
        self._files: list[_File] = []
        self._taken = 0
        self._listed_s = -math.inf
        self._day = 0
        # Serialises scans of the directory, which wait for the disk.
        self._scan = threading.Lock()
        self._scanned_ns = -1
        # Guards the fields below. Never held while waiting for the disk, since the actor takes it.
        self._lock = threading.Lock()
        self._index = FileIndex()
        # Files to skip -> whether a later version wrote them.
        self._bad: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._index)

    def find(self, key: bytes) -> BlockLocation | None:
        """The location of a block, if it is known."""
        with self._lock:
            return self._index.find(key)

    def following(self, parent_key: bytes) -> dict[bytes, int]:
        """Blocks whose parent is `parent_key`, and their numbers of tokens."""
        with self._lock:
            return self._index.following(parent_key)

    def look(self) -> None:
        """Refresh the index for files that other workers wrote or removed; cheap when there are none. Raises no
        `OSError`."""
        with contextlib.suppress(OSError), self._scan:
            changed_ns = self.path.stat().st_mtime_ns
            if changed_ns == self._scanned_ns:
                return
            # A second change in the same tick of the clock would not be noticed later.
            is_over = time.time_ns() - changed_ns > _TICK_NS
            with self._lock:
                known = set(self._index.names)
            names = {name for name in os.listdir(self.path) if _NAME.fullmatch(name)}
            with self._lock:
                for gone in known - names:
                    self._index.drop(gone)
                self._bad = {name: is_newer for name, is_newer in self._bad.items() if name in names}
                new = names - self._index.names - self._bad.keys()
            for name in new:
                if name.startswith(self._prefix):
                    self._take_in(name)
            self._scanned_ns = changed_ns if is_over else -1

    def read(self, keys: Sequence[bytes]) -> list[HostBlock]:
        """The blocks of `keys`, each the parent of the next, up to the first that is missing or damaged."""
        blocks: list[HostBlock] = []
        used: list[str] = []
        while len(blocks) < len(keys):
            with self._lock:
                run = self._index.run(keys[len(blocks) :])
                if run is None:
                    break
                name, wanted = run
            read = self._read_file(name, wanted)
            if not read:
                break
            blocks += read
            used.append(name)
        # The first file last: the others cannot be found without it.
        for name in reversed(used):
            with contextlib.suppress(OSError):
                os.utime(self.path / name)
        self.counts["read_blocks"] += len(blocks)
        return blocks

    def write(self, blocks: Sequence[HostBlock]) -> int:
        """Write a run of blocks, each the parent of the next, to one file; returns its bytes. Raises `Refused`."""
        stem = f"{self._prefix}-{blocks[0].key.hex()[:32]}-{blocks[-1].key.hex()[:16]}"
        self._unfinished += 1
        unfinished = self.path / f".{stem}-{os.getpid():x}.{self._unfinished}.part"
        try:
            parts = encode(self._salt, blocks)
            size = sum(map(len, parts))
            self._begin_day()
            if self.counts["written_today_bytes"] + size > self._bounds.written_bytes_max:
                raise Refused("daily_writes", "the daily limit on writes is reached")
            self._make_room(size)
            write_file(unfinished, parts)
            self.counts["written_today_bytes"] += size
            os.rename(unfinished, self.path / f"{stem}.safetensors")
            self._taken += size
            self._files.append(_File(time.time_ns(), f"{stem}.safetensors", size))
            self._count()
            self._sync()
            with self._lock:
                self._index.add(f"{stem}.safetensors", blocks)
        except OSError as error:
            raise Refused("error", str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        self.counts["written_blocks"] += len(blocks)
        return size

    def tidy(self) -> None:
        """Remove damaged and abandoned files, keep to the bounds, and count what there is. Raises no `OSError`."""
        with contextlib.suppress(OSError):
            self.look()
            with self._lock:
                damaged = [name for name, is_newer in self._bad.items() if not is_newer]
            for name in damaged:
                self._remove(name)
            now_s = time.time()
            for path in self.path.iterdir():
                if _UNFINISHED.fullmatch(path.name) and now_s - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()
            self._list()
            with contextlib.suppress(Refused):
                self._make_room(0)
            self._begin_day()

    def _begin_day(self) -> None:
        """Count the bytes written today anew once the day, of UTC, has changed."""
        today = int(time.time() // _DAY_S)
        if today != self._day:
            self._day, self.counts["written_today_bytes"] = today, 0

    # --- files ---

    def _take_in(self, name: str) -> None:
        try:
            header = read_header(self.path / name)
            if header.salt != self._salt:
                raise BadFile("it belongs to another model")
        except BadFile as error:
            self._skip(name, error)
        except OSError as error:
            log.debug("a cached prompt is gone", extra={"file": name, "reason": str(error)})
        else:
            with self._lock:
                self._index.add(name, header.blocks)

    def _read_file(self, name: str, keys: Sequence[bytes]) -> list[HostBlock]:
        started_s = time.perf_counter()
        try:
            blocks = read_blocks(self.path / name, self._salt, keys)
        except BadFile as error:
            self._skip(name, error)
        except OSError:
            # Another worker removed it to make room.
            with self._lock:
                self._index.drop(name)
        else:
            self.read_rate.note(sum(block.bytes for block in blocks), time.perf_counter() - started_s)
            return blocks
        return []

    def _skip(self, name: str, error: BadFile) -> None:
        is_newer = isinstance(error, NewerFile)
        fault = "skipped_newer" if is_newer else "skipped_torn"
        with self._lock:
            self._index.drop(name)
            self._bad[name] = is_newer
            self.counts[fault] += 1
        level = logging.WARNING if self.counts[fault] == 1 else logging.DEBUG
        log.log(level, "a file of cached prompts is skipped", extra={"file": name, "reason": str(error)})

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)
            self.counts["removed_files"] += 1
        with self._lock:
            self._index.drop(name)
            self._bad.pop(name, None)

    def _make_room(self, bytes_: int) -> None:
        """Remove the least recently used files until `bytes_` more fit. Raises `Refused` or `OSError`."""
        if time.monotonic() - self._listed_s > LISTED_S:
            self._list()
        bytes_max, free_min = self._bounds.bytes_max, self._bounds.free_bytes_min
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        while self._taken + bytes_ > bytes_max or free - bytes_ < free_min:
            if not self._files or bytes_ > bytes_max:
                raise Refused("room", f"{free} bytes are free on the disk, and {self._taken} are in use here")
            file = self._files.pop(0)
            used_ns = self._used_ns(file.name)
            if used_ns is not None and used_ns > file.used_ns:
                bisect.insort(self._files, file._replace(used_ns=used_ns))
                continue
            self._remove(file.name)
            self._taken -= file.bytes
            free += file.bytes
        self._count()

    def _list(self) -> None:
        """Read the sizes and the times of use of all files."""
        self._files, self._taken = [], 0
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                self._taken += status.st_size
                if _NAME.fullmatch(entry.name):
                    self._files.append(_File(status.st_mtime_ns, entry.name, status.st_size))
        self._files.sort()
        self._listed_s = time.monotonic()
        self._count()

    def _used_ns(self, name: str) -> int | None:
        try:
            return os.stat(self.path / name, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return None

    def _count(self) -> None:
        self.counts["bytes"], self.counts["files"] = self._taken, len(self._files)

    def _sync(self) -> None:
        # Before this, a crash of the machine may lose the new name.
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _own_directory(path: Path) -> Path:
    """The subdirectory of `path` for block files, made if it is missing. Raises `ConfigError`."""
    directory = path.expanduser() / SUBDIRECTORY
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(f"--cache-dir: {directory} is not a directory of your own: give another one")
        directory.chmod(0o700)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"--cache-dir: {directory} cannot be written to: give another one")
    except OSError as error:
        raise ConfigError(f"--cache-dir: {directory} cannot be used: {error}; give another one") from None
    return directory
