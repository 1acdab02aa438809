"""A disk under `--cache-dir` that fills, fails or becomes read-only: prompts are not kept, and nothing else changes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.prefix_cache.disk import block_file
from zmqengine.engine.prefix_cache.disk.directory import Directory, Refused

CALLS = ("open", "fsync", "rename", "statvfs")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_costs_the_run_that_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """Earlier runs are read, nothing half-written stays, and when the disk is well again runs are written."""
    directory = Directory(tmp_path, SALT, ROOMY)
    directory.tidy()
    kept, lost, later = (chain(seed, 2) for seed in range(3))
    directory.write(kept)

    def fails(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(Refused) as refused:
            directory.write(lost)
        assert refused.value.reason == "error"
        assert os.strerror(error) in str(refused.value)
        directory.tidy()
    assert plain(directory.read([block.key for block in kept])) == plain(kept)
    assert directory.read([block.key for block in lost]) == []
    assert not list(tmp_path.rglob("*.part"))
    directory.write(later)
    assert plain(directory.read([block.key for block in later])) == plain(later)


@pytest.mark.parametrize("written", range(0, 12, 3))
def test_a_disk_that_fills_in_the_middle_of_a_file_leaves_no_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """However far it came."""
    directory = Directory(tmp_path, SALT, ROOMY)
    calls = 0

    class Full:
        def __init__(self, descriptor: int, *_: object, **__: object) -> None:
            self._descriptor = descriptor

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self._descriptor)

        def write(self, data: memoryview) -> int:
            nonlocal calls
            calls += 1
            if calls > written:
                raise OSError(errno.ENOSPC, "no space left on device")
            return os.write(self._descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(block_file, "open", Full, raising=False)
        with pytest.raises(Refused, match="no space left"):
            directory.write(chain(0, 3))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "written-" not in path.name]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A small file system of memory; the call mounts it again with other options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        return place

    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("file systems cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_worker_on_a_disk_that_goes_bad_serves_on(mounted: Callable[[str], Path], fault: str) -> None:
    """On a real file system: streams are whole. Older prompts make room on a full one; a read-only one is told of."""
    pytest.importorskip("mlx.core")
    disk = mounted("size=3m" if fault == "full" else "size=64m")
    options = {"cache_dir": str(disk), "cache_dir_free_bytes": 0, "supervise": False}
    with WorkerProcess(None, **options) as worker, worker.client() as client:
        client.wait_ready()
        prompts = [[seed * 13 % 300 + 1 + place % 200 for place in range(600)] for seed in range(8)]
        first = [client.generate_tokens(prompt, max_tokens=5).read().tokens for prompt in prompts[:4]]
        wait_until(lambda: is_written(client.status().numbers), "prompts are not written")
        if fault == "read-only":
            mounted("remount,ro")
        else:
            fill(disk / "of another program")
        for prompt in prompts[4:]:
            assert len(client.generate_tokens(prompt, max_tokens=5).read().tokens) == 5

        counted = "prompt_disk_refused_error" if fault == "read-only" else "prompt_disk_removed_files"
        wait_until(lambda: client.status().numbers[counted] > 0, "nobody is told that prompts are not kept")
        again = [client.generate_tokens(prompt, max_tokens=5).read().tokens for prompt in prompts[:4]]
        assert again == first
        assert worker.terminate() == 0
        assert worker.log.count("prompts are not written to disk") == (fault == "read-only")


def is_written(numbers: dict[str, float]) -> bool:
    """Whether blocks were written and none is left: a file that is written while the disk fills would be refused."""
    left = numbers["prompt_disk_waiting_bytes"] + numbers["prompt_disk_unsaved_blocks"]
    return numbers["prompt_disk_written_blocks"] > 0 and not left


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
