"""A front-end on another machine that vanishes without a word: its link is cut, no packet says goodbye."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.faults.front_end import Job
from tests.support.workers import WorkerProcess, wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig, expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine.worker.wire.keys import write_key_pair
from zmqengine_client.keys import CLIENT_KEY_VARIABLE, SERVER_KEY_VARIABLE, load_keys

pytestmark = pytest.mark.process

FAKE = FakeEngineConfig(step_ms=5.0, context_tokens=1_000_000)


class Machine:
    """A network namespace with one link to ours: as good as another machine."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:8]
        self.name = f"ze-{tag}"
        self._link = f"ze{tag}"
        subnet = f"10.{200 + os.getpid() % 50}.{int(tag[:2], 16)}"
        self.ours, self.theirs = f"{subnet}.1", f"{subnet}.2"
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.ours}/24", "dev", self._link)
        ip("link", "set", self._link, "up")
        self.run_ip("addr", "add", f"{self.theirs}/24", "dev", "eth0")
        self.run_ip("link", "set", "eth0", "up")

    def run_ip(self, *arguments: str) -> None:
        """`ip` on that machine."""
        ip("-n", self.name, *arguments)

    def cut(self) -> None:
        """From now on no packet passes, and neither side is told."""
        # A link that is down would give our side an error; one that drops everything gives it silence.
        self.run_ip("link", "set", "eth0", "down")

    def close(self) -> None:
        """Remove it."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def why_not() -> str:
    """Why no network namespace can be made here; empty if one can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "making a network namespace needs root and iproute2"
    try:
        Machine().close()
    except subprocess.CalledProcessError as error:
        return f"no network namespace can be made here: {error.stderr.decode().strip()}"
    return ""


@pytest.fixture
def machine() -> Iterator[Machine]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Machine()
    yield made
    made.close()


@pytest.mark.slow
def test_a_front_end_whose_link_is_cut_is_noticed_and_its_rows_are_freed(
    machine: Machine, make_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Nothing says that it is gone but silence; heartbeats notice before the lease of ten minutes, others go on."""
    server, client_files = write_key_pair(tmp_path, "worker"), write_key_pair(tmp_path / "keys", "everyone")
    worker = make_worker(
        FAKE,
        bind=f"tcp://{machine.ours}:0",
        supervise=False,
        server_key=str(server.secret),
        authorized_keys=str(tmp_path / "keys"),
        lease_ms=600_000,
        grace_ms=100,
    )
    wait_until(lambda: "listening" in worker.log, "the worker does not listen")
    worker.address = worker.log.split("address=")[1].split()[0]
    job = Job(address=worker.address, streams=4, tokens_min=100_000, tokens_max=100_000)
    command = [sys.executable, "-m", "tests.faults.front_end", msgspec.json.encode(job).decode()]
    remote = subprocess.Popen(
        ["ip", "netns", "exec", machine.name, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {CLIENT_KEY_VARIABLE: str(client_files.secret), SERVER_KEY_VARIABLE: str(server.public)},
    )
    try:
        assert remote.stdout is not None
        assert remote.stdout.readline() == "READY\n"
        with worker.client(keys=load_keys(client_files.secret, server.public)) as client:
            wait_until(lambda: client.status().numbers["running"] == 4, "the remote streams do not run")
            stream = client.generate_tokens([1, 2], max_tokens=1000, seed=3)
            machine.cut()
            wait_until(lambda: client.status().numbers["running"] <= 1, "a vanished front-end keeps its rows")
            assert client.status().numbers["sessions"] == 1
            assert stream.read().tokens == expected_tokens(RowRequest(0, [1, 2], 1000, seed=3))
    finally:
        remote.kill()
        remote.communicate()
