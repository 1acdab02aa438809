"""`zmqengine status` and `drain`, against a real worker process."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable

import msgspec
import pytest

from tests.cli.conftest import COMMAND, RunningWorker
from tests.support.workers import wait_until
from zmqengine.cli.commands.status import PROGRESS_MIN_S, is_stuck, launcher_lines
from zmqengine.protocol.launcher import ModelEntry, ModelList
from zmqengine.protocol.messages import Status
from zmqengine.worker.timers import IDLE_WAIT_MS_MAX

Run = Callable[..., subprocess.CompletedProcess[str]]
StartWorker = Callable[..., RunningWorker]


def test_status_shows_state_model_and_load(start_worker: StartWorker, run: Run) -> None:
    """Lines for people."""
    worker = start_worker()
    wait_until_ready(worker, run)
    shown = run("status", "-w", worker.name)
    assert shown.returncode == 0, shown.stderr
    assert f"{worker.name}, process {worker.process.pid}" in shown.stdout
    assert "ready" in shown.stdout
    assert "4096 tokens of context" in shown.stdout


def test_the_models_of_a_launcher_are_shown_with_their_adapters() -> None:
    """Beside how long they stay."""
    models = [
        ModelEntry("a", "ready", "ipc://a", adapters=["legal", "terse"], expires_s=60.0),
        ModelEntry("b", "ready", "ipc://b", adapters=["legal"], pin=True),
        ModelEntry("c", "unloaded", "ipc://c"),
    ]
    lines = launcher_lines(ModelList(0, b"12345678", models, budget_bytes=1, reserved_bytes=0))
    assert lines[-3].endswith("adapters legal, terse; unloaded in 1 min if idle"), lines
    assert lines[-2].endswith("adapters legal; pinned")
    assert lines[-1].endswith("none")


def test_status_json_is_complete(start_worker: StartWorker, run: Run) -> None:
    """For programs: both replies, with the epoch as text."""
    worker = start_worker()
    wait_until_ready(worker, run)
    both = json.loads(run("status", "-w", worker.name, "--json").stdout)
    assert both["status"]["state"] == "ready"
    assert both["description"]["model"]["vocab_size"] == 257
    assert both["status"]["epoch"] == both["description"]["epoch"]
    assert len(bytes.fromhex(both["status"]["epoch"])) == 8


def test_status_of_no_worker_is_one_line_and_code_1(short_directory: str, run: Run) -> None:
    """For health checks."""
    shown = run("status", "--timeout", "0.3")
    assert shown.returncode == 1
    assert shown.stdout == ""
    assert len(shown.stderr.splitlines()) == 1
    assert "zmqengine worker" in shown.stderr


def test_ready_is_not_the_same_as_alive(start_worker: StartWorker, run: Run) -> None:
    """A worker that drains answers, with code 0, and is not ready, with code 1."""
    worker = start_worker(step_ms=50)
    wait_until_ready(worker, run)
    long = subprocess.Popen(
        [*COMMAND, "generate", "-w", worker.name, "-n", "2000", "x"], stdout=subprocess.PIPE
    )
    assert long.stdout is not None
    assert long.stdout.read(1)
    assert run("drain", "-w", worker.name).returncode == 0
    assert run("status", "-w", worker.name).returncode == 0
    assert run("status", "-w", worker.name, "--ready").returncode == 1
    long.kill()
    long.wait()


def test_drain_ends_the_worker_with_code_0(start_worker: StartWorker, run: Run) -> None:
    """And leaves no socket behind."""
    worker = start_worker()
    wait_until_ready(worker, run)
    drained = run("drain", "-w", worker.name)
    assert drained.returncode == 0, drained.stderr
    assert worker.process.wait(60) == 0
    assert not worker.socket.exists()


def wait_until_ready(worker: RunningWorker, run: Run) -> None:
    """Ask until it says ready."""
    wait_until(lambda: run("status", "-w", worker.name, "--ready").returncode == 0, worker.log.read_text())


def test_status_shows_who_is_connected_what_runs_and_the_rate(start_worker: StartWorker, run: Run) -> None:
    """A page for people: no bytes, no microseconds."""
    worker = start_worker(step_ms=20, rows_max=1)
    wait_until_ready(worker, run)
    # The second waits for the only row.
    talking = [
        subprocess.Popen([*COMMAND, "generate", "-w", worker.name, "-n", "3000", "x"], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        wait_until(
            lambda: "1 waits for a row" in run("status", "-w", worker.name).stdout, worker.log.read_text()
        )
        shown = run("status", "-w", worker.name).stdout
        assert re.search(r"requests +1 running, 1 waiting, [\d,]+ tokens/s", shown), shown
        assert re.search(
            r"front-ends +\S.*: \d running, \d waiting\n +\S.*: \d running, \d waiting", shown
        ), shown
        assert re.search(r"memory +[\d.]+[KMG]? of [\d.]+[MG] \(\d+%\)", shown), shown
        assert "_us_" not in shown
        assert "pass_whole_us_p50" in run("status", "-w", worker.name, "--all").stdout
    finally:
        for process in talking:
            process.kill()
            process.communicate()


def test_progress_is_asked_of_a_worker_that_has_its_model() -> None:
    """Loading may take its time; an idle worker turns its loop often enough."""
    now = Status(0, bytes(8), "ready", uptime_s=100.0, pass_age_ms=15_100.0, numbers={}, facts={})
    assert is_stuck(now, 15.0)
    assert not is_stuck(now, 16.0)
    assert not is_stuck(msgspec.structs.replace(now, state="loading"), 15.0)
    assert IDLE_WAIT_MS_MAX / 1000 < PROGRESS_MIN_S


@pytest.mark.slow
@pytest.mark.skipif("ZMQENGINE_TEST_HANG" not in os.environ, reason="half a minute: set ZMQENGINE_TEST_HANG")
def test_a_probe_finds_a_worker_that_hangs_in_a_step(start_worker: StartWorker, run: Run) -> None:
    """Alive and without progress: what a liveness probe has to find."""
    worker = start_worker(faults=[{"place": "next", "action": "hang", "index": 6}])
    wait_until_ready(worker, run)
    assert run("status", "-w", worker.name, "--progress", "15").returncode == 0
    talking = subprocess.Popen(
        [*COMMAND, "generate", "-w", worker.name, "-n", "30", "x"], stdout=subprocess.PIPE
    )
    try:
        wait_until(
            lambda: run("status", "-w", worker.name, "--progress", "15").returncode == 1,
            "the hang was not found",
        )
        assert run("status", "-w", worker.name).returncode == 0
    finally:
        talking.kill()
        talking.communicate()
