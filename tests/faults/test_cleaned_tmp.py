"""A worker lives for weeks in /tmp, where systems remove what was not touched for days."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.workers import WorkerProcess, wait_until
from tests.worker.harness import Harness

HOUR_S, DAY_S = 3600.0, 86_400.0
REMOVED_AFTER_S = 3 * DAY_S
"""macOS; systemd-tmpfiles waits for 10 days."""


def test_an_idle_week_never_lets_a_file_grow_old(tmp_path: Path) -> None:
    """A cleaner by the clock of the test removes what is older than 3 days: it finds nothing, for 14 days."""
    harness = Harness(tmp_path / "w")
    # A launcher that was killed leaves the worker its record, by which the next one finds it.
    record = tmp_path / "w.json"
    record.touch()
    now_s, touched_s = 0.0, dict.fromkeys((tmp_path / "w", record, *harness.sockets.files), 0.0)
    while now_s < 14 * DAY_S:
        for path in touched_s:
            os.utime(path, (1, 1))
        # An idle worker waits for at most 10 s.
        harness.clock.advance(10.0)
        now_s += 10.0
        harness.actor._timers.keep(harness.clock())
        for path in touched_s:
            if path.stat().st_mtime > 1:
                touched_s[path] = now_s
            assert now_s - touched_s[path] < 2 * HOUR_S < REMOVED_AFTER_S
        harness.clock.advance(HOUR_S / 2)
        now_s += HOUR_S / 2
    harness.close()


@pytest.mark.process
def test_a_worker_whose_directory_is_removed_is_found_again() -> None:
    """A stream goes on meanwhile, and a new front-end connects; no second worker gets the name."""
    with WorkerProcess(supervise=False) as worker, worker.client() as before:
        worker.wait_ready()
        stream = iter(before.generate_tokens([1, 2, 3], max_tokens=2000))
        count = len(next(stream).tokens)
        directory = worker.directory / "w"
        shutil.rmtree(directory)
        wait_until(
            lambda: all((directory / name).is_socket() for name in ("ctl", "cmd", "out")),
            "the socket files are not written anew",
        )
        assert count + sum(len(chunk.tokens) for chunk in stream) == 2000
        with worker.client() as after:
            assert len(after.generate_tokens([1, 2, 3], max_tokens=5).read().tokens) == 5
        with WorkerProcess(supervise=False, bind=worker.address) as second:
            assert second.process.wait(60) == 78
            assert "already running" in second.log
        assert worker.terminate() == 0
        assert not directory.exists()
