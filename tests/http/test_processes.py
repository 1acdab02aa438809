"""`zmqengine http --processes`: real processes on one port, real kills."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.front import WAIT_S, wait_until
from tests.support.ports import is_refused
from tests.support.processes import is_alive, wait_until_dead
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine_client import Client

pytestmark = pytest.mark.process

PROCESSES = 2
NAME = "zmqengine http"


def command(worker: FakeWorker, port: int) -> list[str]:
    """`zmqengine http` in several processes."""
    options = {"--worker": worker.address, "--port": str(port), "--processes": str(PROCESSES)}
    return [sys.executable, "-m", "zmqengine.cli.main", "http", *chain.from_iterable(options.items())]


class FrontEnd:
    """The command, its processes and what it said."""

    def __init__(self, worker: FakeWorker, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command(worker, 0), stderr=file)
        wait_until(lambda: len(self.events("worker", state="ready")) == PROCESSES, "all are ready")
        self.port = int(self.events("listening")[0]["url"].rsplit(":", 1)[1])

    def events(self, event: str, **fields: object) -> list[dict[str, Any]]:
        """What it has logged of this."""
        lines = self._log.read_text().splitlines(keepends=True)
        logged = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in logged if each.items() >= {"event": event, **fields}.items()]

    def pids(self) -> list[int]:
        """Of the processes that serve."""
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]

    def ask(self, path: str, body: object = None) -> bytes:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
            response = connection.getresponse()
            data = response.read()
            assert response.status == 200, (data, self._log.read_text()[-3000:])
            return data
        finally:
            connection.close()

    def complete_all(self, count: int) -> list[bytes]:
        """So many answers at once."""
        with ThreadPoolExecutor(count) as threads:
            body = {"prompt": [7], "max_tokens": 3, "seed": 1, "ignore_eos": True}
            answers = threads.map(lambda _: self.ask("/v1/completions", body), range(count))
            return [json.loads(answer)["choices"][0]["text"].encode() for answer in answers]

    def counted(self) -> float:
        """Completions that were answered, as any of the processes tells it."""
        families = text_string_to_metric_families(self.ask("/metrics").decode())
        wanted = {"path": "/v1/completions", "status": "200"}
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "zmqengine_http_requests_total" and sample.labels == wanted
        )

    def close(self) -> None:
        """End it and all of its processes."""
        pids = self.pids() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(WAIT_S)
        for pid in pids:
            wait_until_dead(pid)


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    """20 ms a step, so that a stream lasts."""
    with FakeWorker(FakeEngineConfig(step_ms=20, context_tokens=200_000), process=True) as worker:
        yield worker


@pytest.fixture
def front_end(worker: FakeWorker, tmp_path: Path) -> Iterator[FrontEnd]:
    front_end = FrontEnd(worker, tmp_path / "log")
    yield front_end
    front_end.close()


def accepted_by(pid: int, port: int) -> int:
    """Connections at this port that this process has."""
    found = psutil.Process(pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


def test_all_of_them_serve_and_count_together(front_end: FrontEnd, worker: FakeWorker) -> None:
    """Each is a session at the worker; whichever is asked tells what all have answered. Another command gets no share
    of their port."""
    answers = front_end.complete_all(16)
    assert len(set(answers)) == 1
    wait_until(lambda: {front_end.counted() for _ in range(6)} == {16}, "all of them tell of all")
    with Client(worker.address) as client:
        assert [session.client for session in client.status().sessions].count(NAME) == PROCESSES
    if sys.platform == "linux":
        # Elsewhere one of them may get all that comes at once.
        idle = [socket.create_connection(("127.0.0.1", front_end.port)) for _ in range(40)]
        shares = [lambda pid=pid: accepted_by(pid, front_end.port) for pid in front_end.pids()]
        wait_until(lambda: sum(share() for share in shares) == 40, "all are accepted")
        assert min(share() for share in shares) >= 5
        for connection in idle:
            connection.close()
    other = subprocess.run(
        command(worker, front_end.port), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert other.returncode == 2
    assert "cannot listen" in other.stderr


@pytest.mark.slow
def test_one_that_is_killed_is_started_again(front_end: FrontEnd) -> None:
    """What comes meanwhile is answered, by the others or by the new one; what was counted stays."""
    before = front_end.complete_all(8)
    wait_until(lambda: front_end.counted() == 8, "all are counted")
    victim, *others = front_end.pids()
    os.kill(victim, signal.SIGKILL)
    wait_until_dead(victim)
    assert front_end.complete_all(24) == before[:1] * 24
    wait_until(lambda: front_end.counted() == 32, "those of the killed one are counted")
    wait_until(lambda: len(front_end.pids()) == PROCESSES, "there is a new one")
    assert set(others) < set(front_end.pids())


@pytest.mark.slow
def test_sigterm_lets_running_answers_finish(front_end: FrontEnd) -> None:
    """In every process; then none is left, and the exit code is 0."""
    pids = front_end.pids()
    body = {"prompt": [7], "max_tokens": 40, "stream": True, "ignore_eos": True}
    connections = []
    for _ in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", front_end.port, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body))
        connections.append((connection, connection.getresponse()))
    front_end.process.send_signal(signal.SIGTERM)
    for connection, response in connections:
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
    assert front_end.process.wait(WAIT_S) == 0
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
def test_a_second_signal_ends_at_once(front_end: FrontEnd) -> None:
    """Whoever cannot wait for an answer of 2,000 seconds says so again."""
    body = {"prompt": [7], "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", front_end.port, timeout=WAIT_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {")
    front_end.process.send_signal(signal.SIGINT)
    wait_until(lambda: is_refused(front_end.port), "nobody is let in any more")
    assert front_end.process.poll() is None
    front_end.process.send_signal(signal.SIGINT)
    assert front_end.process.wait(WAIT_S) == 0
    connection.close()


@pytest.mark.slow
def test_they_end_with_what_started_them(front_end: FrontEnd) -> None:
    """SIGKILL, which nobody can pass on."""
    pids = front_end.pids()
    front_end.process.kill()
    for pid in pids:
        wait_until_dead(pid)
