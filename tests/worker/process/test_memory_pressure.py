"""Memory pressure: read from the system once a second, and answered before the system kills."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tests.worker.harness import Harness
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.worker.process.memory_pressure import Level, pressure_source
from zmqengine.worker.process.memory_share import MemoryShare

ENGINE = FakeEngineConfig(kv_bytes_token=1000, prompt_cache_bytes=1 << 30, rows_max=8)


def linux(root: Path, *, full: str = "0.00", group: str = "", used: int = 0, limit: str = "max") -> Path:
    """The files of a Linux machine, with a control group."""
    (root / "proc/pressure").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/pressure/memory").write_text(
        f"some avg10=99.00 avg60=0.00 avg300=0.00 total=5\nfull avg10={full} avg60=99.00 avg300=0.00 total=5\n"
    )
    (root / "proc/self/cgroup").write_text(f"4:memory:/old\n0::/{group}\n")
    inner = root / "sys/fs/cgroup" / group / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "memory.max").write_text(limit + "\n")
    (inner.parent / "memory.current").write_text(f"{used}\n")
    (inner.parent / "memory.stat").write_text("anon 5\ninactive_file 1000\nactive_file 7\n")
    return root


@pytest.mark.parametrize(
    ("full", "used", "limit", "level"),
    [
        ("0.00", 0, "max", "normal"),
        ("9.90", 0, "max", "normal"),
        ("12.50", 0, "max", "warning"),
        ("45.00", 0, "max", "critical"),
        # A thousand bytes of files may go.
        ("0.00", 9_900, "10000", "normal"),
        ("0.00", 10_100, "10000", "warning"),
        ("0.00", 10_600, "10000", "critical"),
        ("12.50", 10_600, "10000", "critical"),
    ],
)
def test_linux_tells_by_stalls_and_by_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, used: int, limit: str, level: Level
) -> None:
    """The worse of the two; a group above this one counts as well."""
    monkeypatch.setattr("sys.platform", "linux")
    assert pressure_source(linux(tmp_path, full=full, used=used, limit=limit))() == level


def test_a_limit_above_the_own_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's limit is not the container's."""
    monkeypatch.setattr("sys.platform", "linux")
    root = linux(tmp_path, group="pod", used=10_600, limit="10000")
    (root / "proc/self/cgroup").write_text("0::/pod/inner\n")
    assert pressure_source(root)() == "critical"


def test_a_system_that_tells_nothing_has_no_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel, or a container that hides it."""
    monkeypatch.setattr("sys.platform", "linux")
    assert pressure_source(tmp_path)() == "normal"
    assert pressure_source()() in ("normal", "warning", "critical")


@pytest.mark.parametrize(
    ("told", "level"), [(1, "normal"), (2, "warning"), (4, "critical"), (None, "normal"), (0, "normal")]
)
def test_macos_tells_by_a_sysctl(monkeypatch: pytest.MonkeyPatch, told: int | None, level: Level) -> None:
    """By the fake of its C function, called as ctypes calls it; one that fails tells nothing."""

    class System:
        @staticmethod
        def sysctlbyname(name: bytes, value: object, size: object, new: object, new_size: object) -> int:
            assert name == b"kern.memorystatus_vm_pressure_level"
            if told is None:
                return -1
            value._obj.value = told  # type: ignore[attr-defined]
            assert size._obj.value == ctypes.sizeof(ctypes.c_int)  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: System)
    assert pressure_source()() == level


def fill_prompt_cache(harness: Harness) -> int:
    front_end = harness.front_end()
    for number in range(4):
        front_end.accepted(f"fill{number}", [number + 1] * 64, max_tokens=2)
    front_end.wait_for_end(*(f"fill{number}" for number in range(4)))
    return harness.engine.memory().prompt_cache


def look(harness: Harness) -> None:
    harness.clock.advance(1.1)
    harness.pass_()


def test_cached_prompts_and_buffers_go_first(make_harness) -> None:
    """At a warning half of them, at a critical level all; they come back when it is over."""
    harness: Harness = make_harness(ENGINE)
    held = fill_prompt_cache(harness)
    assert held > 0
    harness.pressure = "warning"
    for _ in range(3):
        look(harness)
    assert 0 < harness.engine.memory().prompt_cache <= held // 2
    assert harness.released == 1
    assert harness.shared_status.facts["pressure"] == "warning"
    harness.pressure = "critical"
    for _ in range(3):
        look(harness)
    # One of them is that of every pause.
    assert harness.released == 5
    assert harness.engine.memory().prompt_cache == 0
    harness.pressure = "normal"
    look(harness)
    assert "pressure" not in harness.shared_status.facts
    assert fill_prompt_cache(harness) > 0


def test_nothing_starts_beside_what_runs_while_it_is_critical(make_harness) -> None:
    """What runs goes on, one at a time is let in, and nothing is refused or lost."""
    harness: Harness = make_harness(ENGINE)
    front_end = harness.front_end()
    for number in range(3):
        front_end.accepted(f"before{number}", [1, 2, 3], max_tokens=40)
    harness.passes(3)
    harness.pressure = "critical"
    look(harness)
    names = [f"after{number}" for number in range(3)]
    for name in names:
        front_end.accepted(name, [1, 2, 3], max_tokens=40)
    harness.passes(5)
    assert {row.id for row in harness.actor.scheduler.running.values()} == {f"before{n}" for n in range(3)}
    waiting = harness.actor.lifecycle.live()[-1]
    assert harness.actor.lifecycle.waits_for(harness.actor.lifecycle.live()[3], harness.clock()) == (
        "memory: the system has too little left"
    )
    assert waiting.phase == "queued"
    most = 0
    while harness.actor.lifecycle.live():
        harness.pass_()
        if not any(row.id.startswith("before") for row in harness.actor.scheduler.running.values()):
            most = max(most, len(harness.actor.scheduler.running))
    assert most == 1
    assert [end.finish for end in front_end.wait_for_end(*names)] == ["length"] * 3


def test_a_smaller_share_reaches_the_engine(make_harness, tmp_path: Path) -> None:
    """Another worker came: what this one may hold falls, and the platform under its engine is told."""
    share = MemoryShare(tmp_path / "claims", "mine", None)
    share.claim(1 << 20, 1 << 30)
    harness: Harness = make_harness(ENGINE, memory_limit_bytes=1 << 30, memory_share=share)
    harness.pass_()
    other = _claim_of_another(tmp_path / "claims")
    look(harness)
    told = harness.engine.memory_limit_bytes
    assert told == harness.actor.scheduler.memory.limit_bytes
    assert told <= (1 << 29) + (1 << 20)
    other.close()
    share.close()


def test_rows_of_two_workers_know_of_each_other(make_harness, tmp_path: Path) -> None:
    """A worker that streams is told to the engine of one that reads, within a second."""
    shares = [MemoryShare(tmp_path / "claims", name, None) for name in ("streams", "reads")]
    for share in shares:
        share.claim(1 << 20, 1 << 40)
    streams, reads = (make_harness(ENGINE, memory_share=share) for share in shares)
    front_end = streams.front_end()
    for number in range(3):
        front_end.accepted(f"r{number}", [1, 2, 3], max_tokens=50)
    streams.passes(5)
    for harness in (streams, reads):
        look(harness)
    assert (streams.engine.decoding_elsewhere, reads.engine.decoding_elsewhere) == (0, 3)
    front_end.wait_for_end("r0", "r1", "r2")
    for harness in (streams, reads):
        look(harness)
    assert reads.engine.decoding_elsewhere == 0
    for share in shares:
        share.close()


def test_a_claim_is_touched_every_hour(make_harness, tmp_path: Path) -> None:
    """Beside the sockets; see tests/faults/test_cleaned_tmp.py."""
    share = MemoryShare(tmp_path / "claims", "mine", None)
    share.claim(1 << 20, 1 << 40)
    harness: Harness = make_harness(ENGINE, memory_share=share)
    harness.pass_()
    (path,) = (tmp_path / "claims").glob("*.json")
    os.utime(path, (1, 1))
    harness.clock.advance(3601)
    harness.pass_()
    assert path.stat().st_mtime > 1
    share.close()


def _claim_of_another(directory: Path) -> MemoryShare:
    other = MemoryShare(directory, "other", None)
    other.claim(1 << 20, 1 << 30)
    return other
