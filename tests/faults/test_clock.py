"""A clock that jumps by a day, as after a wrong date was set right: nothing waits by it, and the cache lives on."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain, plain
from tools import module_graph
from zmqengine.engine.prefix_cache.disk.directory import Directory

ROOT = Path(__file__).resolve().parents[2]
DAY_S = 86_400.0
# The clock on the wall is for people, for the wire formats of others, and for files that processes share.
BY_THE_WALL = {
    "zmqengine/engine/prefix_cache/disk/directory.py",
    "clients/zmqengine_http/apis/batch_files.py",
    "clients/zmqengine_http/apis/metrics.py",
    "clients/zmqengine_http/apis/models.py",
    "clients/zmqengine_http/apis/ollama/models.py",
    "clients/zmqengine_http/apis/openai_api/frame.py",
    "clients/zmqengine_http/apis/responses/writer.py",
    # A batch outlives its front-end, and ends at the date that its caller was told.
    "clients/zmqengine_http/batches/runner.py",
    "clients/zmqengine_http/batches/stored_files.py",
    "clients/zmqengine_http/serving/tracing.py",
}


def test_no_wait_deadline_or_lease_goes_by_the_clock_on_the_wall() -> None:
    """A worker, a client or a supervisor that slept, or whose date was set, ends nothing for it."""
    found = set()
    for room in ("zmqengine/worker", "zmqengine/engine", "zmqengine/serve", "zmqengine/protocol", "clients"):
        for path in (ROOT / room).rglob("*.py"):
            if "time.time" not in path.read_text("utf-8"):
                continue
            for node in ast.walk(module_graph.tree(path)):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("time", "time_ns")
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "time"
                ):
                    found.add(path.relative_to(ROOT).as_posix())
    assert found <= BY_THE_WALL


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, 400 * DAY_S])
def test_cached_prompts_outlive_a_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """In a process that was there before it and in one that started after it; bounds hold, and runs are written."""
    before = Directory(tmp_path, SALT, ROOMY)
    runs = [chain(seed, 2) for seed in range(4)]
    before.write(runs[0])
    real_s, real_ns, real_date = time.time, time.time_ns, time.gmtime
    monkeypatch.setattr(time, "time", lambda: real_s() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(jump_s * 1e9))
    monkeypatch.setattr(time, "gmtime", lambda *_: real_date(real_s() + jump_s))
    after = Directory(tmp_path, SALT, ROOMY)
    for number, directory in enumerate((before, after)):
        directory.tidy()
        directory.write(runs[number + 1])
    monkeypatch.undo()
    before.write(runs[3])
    for directory in (before, after, Directory(tmp_path, SALT, ROOMY)):
        directory.tidy()
        directory.look()
        for run in runs:
            assert plain(directory.read([block.key for block in run])) == plain(run)
        assert directory.counts["files"] == 4


def test_a_jump_does_not_write_more_than_a_day_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back on the right date, what was written on it still counts."""
    bounds = ROOMY._replace(written_bytes_max=1 << 20)
    directory = Directory(tmp_path, SALT, bounds)
    directory.write(chain(0, 2))
    directory.tidy()
    counted = directory.counts["written_today_bytes"]
    assert counted > 0
    real_date = time.gmtime
    monkeypatch.setattr(time, "gmtime", lambda *_: real_date(time.time() - DAY_S))
    directory.tidy()
    monkeypatch.undo()
    directory.tidy()
    assert directory.counts["written_today_bytes"] == counted
