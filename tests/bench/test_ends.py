"""A run that is ended takes its servers with it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.process

TIMEOUT_S = 60.0


def test_a_run_that_is_terminated_ends_its_servers() -> None:
    """By SIGTERM in the middle of a measurement: the worker process goes too, and the exit code says so."""
    words = ["serve", "--start", "worker", "--rounds", "999", "--size", "small"]
    run = subprocess.Popen(
        [sys.executable, "-m", "zmqengine.cli.main", "bench", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stderr is not None
        assert any("round 2" in line for line in run.stderr)
        servers = psutil.Process(run.pid).children(recursive=True)
        assert servers
        run.send_signal(signal.SIGTERM)
        run.stderr.read()
        assert run.wait(TIMEOUT_S) == 130
        _, alive = psutil.wait_procs(servers, timeout=TIMEOUT_S)
        assert alive == []
    finally:
        run.kill()
