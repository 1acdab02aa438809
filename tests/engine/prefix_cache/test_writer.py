"""Writer: order, refusals, and the directory that a killed process leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from tests.engine.prefix_cache.writing_process import BLOCK_BYTES, BLOCKS
from zmqengine.engine.prefix_cache.disk.directory import Directory, DiskBounds
from zmqengine.engine.prefix_cache.disk.write_thread import Writer

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("ZMQENGINE_CACHE_KILLS", "200"))
WAIT_S = 60.0


def test_what_is_handed_over_is_written_in_order(tmp_path: Path) -> None:
    """And all of it before the thread ends."""
    directory = Directory(tmp_path, SALT, ROOMY)
    writer = Writer(directory)
    chains = [chain(seed, 3) for seed in range(5)]
    room = writer.room_bytes
    for blocks in chains:
        writer.write(blocks[:2])
        writer.write(blocks[2:])
    assert writer.close(WAIT_S)
    assert writer.room_bytes == room
    assert not any(number for name, number in directory.counts.items() if name.startswith("refused"))
    again = Directory(tmp_path, SALT, ROOMY)
    again.look()
    for blocks in chains:
        assert plain(again.read([block.key for block in blocks])) == plain(blocks)


def test_a_disk_that_fails_is_left_alone_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block that is not written is counted by its reason, and there is one warning."""

    def fail(descriptor: int) -> None:
        tried.append(descriptor)
        raise OSError(28, "No space left on device")

    tried: list[int] = []
    monkeypatch.setattr("zmqengine.engine.prefix_cache.disk.block_file.os.fsync", fail)
    directory = Directory(tmp_path, SALT, ROOMY)
    writer = Writer(directory)
    for seed in range(3):
        writer.write(chain(seed, 2))
    assert writer.close(WAIT_S)
    assert directory.counts["refused_error"] == 6
    assert writer.room_bytes == 0
    assert len(tried) == 1
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert [path.name for path in (tmp_path / "prompts").iterdir() if "written" not in path.name] == []


@pytest.mark.parametrize(
    "kills", [2, pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_writers_leave_nothing_wrong(tmp_path: Path, kills: int) -> None:
    """SIGKILL while two of them write, evict and read in one directory: every block that is found is right, nothing
    is torn, the bound of each holds but for what was unfinished, and the next one starts."""
    numbers = random.Random(kills)
    run_bytes = 2 * (2 * BLOCK_BYTES + 10_000)
    bytes_max = 9 * run_bytes
    seed = 0
    seen = evicted = 0
    for kill in range(kills):
        writers = []
        for _ in range(2):
            writers.append(start_writer(tmp_path, bytes_max, seed))
            seed += 1_000_000
        last = [0, 0]
        for number, writer in enumerate(writers):
            assert writer.stdout is not None
            for _ in range(numbers.randint(2, 12)):
                last[number] = int(writer.stdout.readline())
        for number, writer in enumerate(writers):
            writer.kill()
            writer.wait(WAIT_S)
            # It went on until now: of what it began before its last runs, the other one's may have taken the room. Some
            # of what it said since may have been read ahead, which `communicate` would not see.
            assert writer.stdout is not None
            last[number] = max([last[number], *map(int, writer.stdout.read().split())])
            writer.stdout.close()
        directory = Directory(tmp_path, SALT, DiskBounds(bytes_max, 0, 1 << 60))
        directory.look()
        parts = list(directory.path.glob("*.part"))
        unfinished = sum(path.stat().st_size for path in parts)
        total = sum(path.stat().st_size for path in directory.path.iterdir())
        # Until it lists the files anew, neither knows what the other one writes.
        assert total - unfinished <= 2 * bytes_max
        first = 2_000_000 * kill
        for start, end in ((first, last[0]), (first + 1_000_000, last[1])):
            for known in range(max(start, end - 8), end + 1):
                blocks = chain(known, BLOCKS, size=BLOCK_BYTES)
                found = directory.read([block.key for block in blocks])
                assert plain(found) == plain(blocks[: len(found)])
                seen += len(found)
                evicted += BLOCKS - len(found)
        assert directory.counts["skipped_torn"] == 0
        # They take room until nobody has gone on with them for a while: let that while be over.
        for path in parts:
            os.utime(path, (0, 0))
    assert seen > 4 * kills, (last, evicted, len(directory), sorted(os.listdir(directory.path)))
    assert evicted > kills


def start_writer(path: Path, bytes_max: int, seed: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.engine.prefix_cache.writing_process",
        str(path),
        str(bytes_max),
        str(seed),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
