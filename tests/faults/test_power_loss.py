"""Power that fails between any two writes to `--cache-dir`: what was kept is right or not there, and nothing else."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from zmqengine.engine.prefix_cache.disk import block_file
from zmqengine.engine.prefix_cache.disk.block_file import HostBlock
from zmqengine.engine.prefix_cache.disk.directory import Directory

RUNS = [chain(seed, 3) for seed in range(3)]
LOSSES = ("nothing", "all bytes", "half of the bytes", "the bytes but not the length")
"""Of the files that were written and not synced; a system may keep any part of them."""


class Disk:
    """A directory that is copied at every call that changes it, and the files with bytes that may be in memory only."""

    def __init__(self, path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._copies = path, copies
        self.unsynced: set[Path] = set()
        self._copying = False
        self.done = 0
        """Runs whose `write` has returned."""
        self.images: list[tuple[Path, set[str], int]] = []
        for name in ("rename", "unlink", "write", "utime"):
            monkeypatch.setattr(os, name, self._noticed(getattr(os, name)))
        # What a disk keeps is told by the copies: the real one need not be waited for.
        monkeypatch.setattr(os, "fsync", self._synced(lambda _: None))
        monkeypatch.setattr(block_file, "open", self._open, raising=False)

    def copy(self) -> None:
        if self._copying:
            return
        self._copying = True
        image = self._copies / f"{len(self.images)}"
        shutil.copytree(self.path, image)
        self.images.append((image, {str(path.relative_to(self.path)) for path in self.unsynced}, self.done))
        self._copying = False

    def _noticed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(first: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(first, int):
                self.unsynced.add(_path_of(first))
            self.copy()
            found = call(first, *arguments, **options)
            if arguments and first in self.unsynced:
                self.unsynced = {Path(arguments[0]) if path == first else path for path in self.unsynced}
            self.unsynced = {path for path in self.unsynced if path.exists()}
            self.copy()
            return found

        return noticed

    def _synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            self.copy()
            call(descriptor)
            self.unsynced.discard(_path_of(descriptor))
            self.copy()

        return synced

    def _open(self, descriptor: int, *arguments: Any, **options: Any) -> Any:
        file: Any = builtins.open(descriptor, *arguments, **options)  # noqa: SIM115 - closed as a context manager
        disk, write = self, file.write

        class Noticed:
            def __enter__(self) -> Noticed:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: memoryview) -> int:
                disk.unsynced.add(_path_of(descriptor))
                # In pieces: power may fail between them too.
                count: int = write(data[: max(1, len(data) // 2)])
                disk.copy()
                return count

        return Noticed()


def _path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def lose(image: Path, unsynced: set[str], loss: str) -> None:
    for name in unsynced:
        path = image / name
        size = path.stat().st_size
        if loss == "all bytes":
            path.write_bytes(b"")
        elif loss == "half of the bytes":
            path.write_bytes(path.read_bytes()[: size // 2])
        elif loss == "the bytes but not the length":
            path.write_bytes(bytes(size))


def restarted(image: Path) -> Directory:
    directory = Directory(image, SALT, ROOMY)
    directory.tidy()
    directory.look()
    return directory


def read(directory: Directory, run: list[HostBlock]) -> list[HostBlock]:
    return directory.read([block.key for block in run])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are those of Linux")
def test_power_may_fail_between_any_two_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is there as it was written, or it is not; one whose write had returned is; and the next start writes on."""
    directory = Directory(tmp_path / "cache", SALT, ROOMY)
    directory.tidy()
    with monkeypatch.context() as patch:
        disk = Disk(tmp_path / "cache", tmp_path / "copies", patch)
        for run in RUNS[:-1]:
            directory.write(run)
            disk.done += 1
            read(directory, run)
            directory.tidy()
    monkeypatch.setattr(os, "fsync", lambda _: None)
    assert len(disk.images) > 20
    assert sum(bool(unsynced) for _, unsynced, _ in disk.images) > 6
    for image, unsynced, done in disk.images:
        for loss in LOSSES if unsynced else LOSSES[:1]:
            copy = tmp_path / "after"
            shutil.copytree(image, copy)
            lose(copy, unsynced, loss)
            after = restarted(copy)
            for number, run in enumerate(RUNS[:-1]):
                found = read(after, run)
                assert plain(found) in ([], plain(run)), (image, loss)
                assert found or number >= done, (image, loss)
            after.write(RUNS[-1])
            assert plain(read(restarted(copy), RUNS[-1])) == plain(RUNS[-1])
            shutil.rmtree(copy)
