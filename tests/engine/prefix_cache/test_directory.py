"""Directory of block files: shared by workers, bounded, with damaged and foreign files in it."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from zmqengine.engine.prefix_cache.disk.block_file import HostBlock
from zmqengine.engine.prefix_cache.disk.directory import (
    ABANDONED_S,
    LISTED_S,
    Directory,
    DiskBounds,
    Refused,
)
from zmqengine.errors import ConfigError


def opened(path: Path, bounds: DiskBounds = ROOMY, salt: bytes = SALT) -> Directory:
    directory = Directory(path, salt, bounds)
    directory.tidy()
    return directory


def keys(blocks: list[HostBlock]) -> list[bytes]:
    return [block.key for block in blocks]


def set_age(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def test_what_one_worker_writes_another_reads(tmp_path: Path) -> None:
    """At once, across files, as far as it goes; other models see nothing of it."""
    first, second, other = opened(tmp_path), opened(tmp_path), opened(tmp_path, salt=bytes(16))
    blocks = chain(0, 6)
    first.write(blocks[:2])
    first.write(blocks[2:5])
    for directory in (first, second, opened(tmp_path)):
        directory.look()
        assert plain(directory.read(keys(blocks))) == plain(blocks[:5])
        assert plain(directory.read(keys(blocks[1:3]))) == plain(blocks[1:3])
        place = directory.find(blocks[4].key)
        assert place is not None
        assert place.has_state
        assert directory.find(blocks[5].key) is None
    other.look()
    assert len(other) == 0
    assert stat.S_IMODE((tmp_path / "prompts").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in first.path.iterdir()} == {0o600}


def test_no_change_goes_unnoticed_however_coarse_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes in the same tick as the last look leaves no other time behind. Later, a look at nothing is cheap."""
    writer, reader = opened(tmp_path), opened(tmp_path)
    # Not yet over, as seen by the clock: whatever comes in this tick has the same time.
    tick = time.time() + 60
    for seed in range(2):
        writer.write(chain(seed, 1))
        os.utime(reader.path, (tick, tick))
        reader.look()
        assert len(reader) == seed + 1
    os.utime(reader.path, (tick - 3600, tick - 3600))
    reader.look()
    monkeypatch.delattr(os, "listdir")
    reader.look()


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """By what any worker used; the beginning of a prompt stays longer than its end."""
    size = 4096
    bounds = ROOMY._replace(bytes_max=37_000)
    writer, reader = opened(tmp_path, bounds), opened(tmp_path, bounds)
    chains = [chain(seed, 2, size=size // 2) for seed in range(4)]
    for number, blocks in enumerate(chains[:3]):
        for block in blocks:
            writer.write([block])
        for path in writer.path.glob("*.safetensors"):
            if path.stat().st_mtime > time.time() - 60:
                set_age(path, 1000 - number)
    writer.tidy()
    reader.look()
    assert len(reader.read(keys(chains[0]))) == 2
    writer.write(chains[3])
    assert writer.counts["bytes"] <= bounds.bytes_max
    assert len(writer.read(keys(chains[0]))) == 2
    assert plain(writer.read(keys(chains[1]))) == plain(chains[1][:1])
    assert len(writer.read(keys(chains[2]))) == 2
    assert len(writer.read(keys(chains[3]))) == 2
    assert sum(path.stat().st_size for path in writer.path.iterdir()) <= bounds.bytes_max


def test_files_that_vanish_are_no_hits(tmp_path: Path) -> None:
    """Another worker may remove any file at any time."""
    directory = opened(tmp_path)
    blocks = chain(0, 4)
    directory.write(blocks[:2])
    directory.write(blocks[2:])
    place = directory.find(blocks[2].key)
    assert place is not None
    (directory.path / place.file).unlink()
    assert plain(directory.read(keys(blocks))) == plain(blocks[:2])
    assert directory.find(blocks[2].key) is None
    directory.write(blocks[2:])
    shutil.rmtree(directory.path)
    assert directory.read(keys(blocks)) == []
    with pytest.raises(Refused) as caught:
        directory.write(chain(1, 1))
    assert caught.value.reason == "error"
    directory.tidy()


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (ROOMY._replace(bytes_max=100), "room"),
        (ROOMY._replace(free_bytes_min=1 << 60), "room"),
        (ROOMY._replace(written_bytes_max=100), "daily_writes"),
    ],
)
def test_what_is_too_much_is_not_written(tmp_path: Path, bounds: DiskBounds, reason: str) -> None:
    """Neither past the bound in bytes, nor into the space that has to stay free, nor more in a day than allowed."""
    directory = opened(tmp_path, bounds)
    with pytest.raises(Refused) as caught:
        directory.write(chain(0, 2))
    assert caught.value.reason == reason
    assert not list(directory.path.glob("*.safetensors"))


def test_a_worker_counts_what_it_wrote_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has been removed since, and not what another worker wrote; the next day begins at nothing."""
    other = opened(tmp_path)
    written = other.write(chain(0, 2))
    worker = opened(tmp_path, ROOMY._replace(written_bytes_max=written + 1))
    assert worker.write(chain(1, 2)) == written
    for path in worker.path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(Refused, match="daily limit"):
        worker.write(chain(2, 2))
    day_s = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: day_s)
    assert worker.write(chain(2, 2)) == written
    assert worker.counts["written_today_bytes"] == written


def test_a_write_looks_at_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is room. What other workers wrote is noticed when the listing is old, and is removed for room."""
    writer, other = opened(tmp_path, ROOMY._replace(bytes_max=10_000)), opened(tmp_path)
    size = writer.write(chain(0, 2))
    with monkeypatch.context() as context:
        context.delattr(os, "scandir")
        writer.write(chain(1, 2))
    for seed in range(2, 12):
        other.write(chain(seed, 2))
    assert size * 12 > 10_000
    now_s = time.monotonic() + LISTED_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    writer.write(chain(12, 2))
    assert sum(path.stat().st_size for path in writer.path.iterdir()) == writer.counts["bytes"] <= 10_000


def test_a_write_is_in_the_counts_at_once(tmp_path: Path) -> None:
    """Not only when the directory is tidied, which it is not while prompts keep coming."""
    directory = opened(tmp_path)
    written = [directory.write(chain(number, 2)) for number in range(3)]
    today = directory.counts["written_today_bytes"]
    counted = directory.counts["bytes"], directory.counts["files"]
    assert today == sum(written)
    files = list(directory.path.iterdir())
    on_disk = sum(path.stat().st_size for path in files)
    assert counted == (on_disk, 3)


def test_files_of_no_use_are_told_of_once_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Torn ones, and those that lie under another's name. A later version's stay, and so does what is not ours."""
    directory = opened(tmp_path)
    chains = [chain(seed, 2) for seed in range(5)]
    for blocks in chains:
        directory.write(blocks)
    paths = [directory.path / directory.find(blocks[0].key).file for blocks in chains]  # type: ignore[union-attr]
    newer, torn, torn_too, swapped, good = paths
    newer.write_bytes(newer.read_bytes().replace(b'"version":"1"', b'"version":"9"'))
    for path in (torn, torn_too):
        os.truncate(path, 300)
    opened(tmp_path / "elsewhere", salt=bytes(16)).write(chains[3])
    os.replace(next((tmp_path / "elsewhere" / "prompts").glob("*.safetensors")), swapped)
    weights = directory.path / "model.safetensors"
    weights.write_bytes(b"somebody's weights")
    names = ("aaf-1f.1.part", ".bashrc.1.part", ".af-1f.1.part~", ".af-1f.x.part", ".af-1f.1xpart")
    others = [directory.path / name for name in names]
    for path in others:
        path.write_bytes(b"somebody's as well")
        set_age(path, ABANDONED_S + 10)
    unfinished = [directory.path / f".{good.stem}-1f.{number}.part" for number in (1, 2)]
    for path in unfinished:
        path.write_bytes(b"...")
    set_age(unfinished[0], ABANDONED_S + 10)

    again = Directory(tmp_path, SALT, ROOMY)
    again.look()
    again.look()
    assert (again.counts["skipped_torn"], again.counts["skipped_newer"]) == (3, 1)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2
    assert [len(again.read(keys(blocks))) for blocks in chains] == [0, 0, 0, 0, 2]
    again.tidy()
    assert {path for path in paths if path.exists()} == {newer, good}
    assert weights.exists()
    assert all(path.exists() for path in others)
    assert [path.exists() for path in unfinished] == [False, True]


def test_a_file_that_goes_bad_while_it_is_known_is_skipped(tmp_path: Path) -> None:
    """What was whole at the start may be damaged when it is needed."""
    directory = opened(tmp_path)
    blocks = chain(0, 4)
    directory.write(blocks[:2])
    directory.write(blocks[2:])
    place = directory.find(blocks[2].key)
    assert place is not None
    path = directory.path / place.file
    data = bytearray(path.read_bytes())
    data[-60] ^= 1
    path.write_bytes(data)
    assert plain(directory.read(keys(blocks))) == plain(blocks[:2])
    assert directory.counts["skipped_torn"] == 1
    directory.tidy()
    assert not path.exists()


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """At the start, with the option to change."""
    (tmp_path / "file").write_text("")
    (tmp_path / "away").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "prompts").symlink_to(tmp_path / "away")
    for path in (tmp_path / "file", tmp_path / "linked"):
        with pytest.raises(ConfigError, match="--cache-dir"):
            Directory(path, SALT, ROOMY)
