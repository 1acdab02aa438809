"""`zmqengine worker` as people run it: the supervisor, its real worker, and real kills."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support.processes import wait_until_dead
from tests.support.workers import wait_until
from zmqengine.engine.fake.fake_engine import expected_tokens
from zmqengine.engine.interface import RowRequest
from zmqengine.errors import ShutDown
from zmqengine.protocol.codec import control_reply_decoder, encode
from zmqengine.protocol.messages import Describe, Description
from zmqengine_client import Client

pytestmark = pytest.mark.process

WAIT_S = 60.0
LISTENING = re.compile(r"listening address=(\S+)")
COMMAND = (
    sys.executable,
    "-m",
    "zmqengine.cli.main",
    "worker",
    "--engine",
    "fake:{}",
    "--restart-wait-ms",
    "1",
)


class Supervised:
    """A supervisor and its worker, with sockets in `directory`."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._log = directory / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *options], stderr=log, env=os.environ | {"ZMQENGINE_DIR": str(directory)}
            )
        self.pids: set[int] = set()

    @property
    def log(self) -> str:
        """What both have said."""
        return self._log.read_text()

    def address(self) -> str:
        """Of ctl, once it listens."""
        wait_until(lambda: LISTENING.search(self.log), "it does not listen")
        found = LISTENING.search(self.log)
        assert found is not None
        return found[1]

    def describe_ready(self, *, other_than: Description | None = None) -> Description:
        """The worker's description, once it is ready and not that earlier life."""
        end_s = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < end_s, self.log
            description = describe(self.address())
            if description is None or description.state != "ready":
                continue
            self.pids.add(description.pid)
            if other_than is None or description.epoch != other_than.epoch:
                return description


@pytest.fixture
def supervise() -> Iterator[Callable[..., Supervised]]:
    """Starts supervised workers; each ends with the test."""
    # Not tmp_path: a socket's path is short.
    directory = Path(tempfile.mkdtemp(prefix="zmqe-", dir="/tmp"))
    started: list[Supervised] = []

    def start(*options: str) -> Supervised:
        started.append(Supervised(directory, *options))
        return started[-1]

    yield start
    for one in started:
        # Also one that no test has seen: it ends with its supervisor, and removes its files meanwhile.
        children = [] if one.process.poll() is not None else psutil.Process(one.process.pid).children()
        one.process.kill()
        one.process.wait()
        for pid in one.pids | {child.pid for child in children}:
            wait_until_dead(pid)
    shutil.rmtree(directory)


@pytest.mark.parametrize("bind", [(), ("--bind", "tcp://127.0.0.1:0")], ids=["ipc", "tcp"])
def test_a_killed_worker_comes_back_at_the_same_addresses(
    supervise: Callable[..., Supervised], bind: tuple[str, ...]
) -> None:
    """SIGKILL leaves no lock and no socket in the way, and a port that was chosen by the system stays chosen."""
    run = supervise(*bind)
    before = run.describe_ready()
    os.kill(before.pid, signal.SIGKILL)
    after = run.describe_ready(other_than=before)
    assert after.pid != before.pid
    assert (after.cmd, after.out) == (before.cmd, before.out)
    assert not before.cmd.endswith(":0")
    wait_until_dead(before.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_supervisor_leaves_nothing_behind(
    supervise: Callable[..., Supervised], number: int
) -> None:
    """No process, no socket, no lock, and code 0."""
    run = supervise()
    description = run.describe_ready()
    # A terminal's Ctrl-C, which goes to a whole group, reaches the worker once: a second one would end its streams.
    assert os.getpgid(description.pid) != os.getpgid(run.process.pid)
    run.process.send_signal(number)
    assert run.process.wait(WAIT_S) == 0, run.log
    wait_until_dead(description.pid)
    assert not Path(description.cmd.removeprefix("ipc://")).parent.exists()


def test_a_killed_supervisor_takes_its_worker_along(supervise: Callable[..., Supervised]) -> None:
    """No orphan holds the GPU, and the next worker finds its address free."""
    run = supervise()
    description = run.describe_ready()
    run.process.kill()
    run.process.wait()
    wait_until_dead(description.pid)
    assert not Path(description.cmd.removeprefix("ipc://")).parent.exists()
    assert supervise().describe_ready().pid != description.pid


def test_an_address_in_use_is_not_tried_again(supervise: Callable[..., Supervised]) -> None:
    """A second worker of the same name says so in one line, and the first is not disturbed."""
    first = supervise()
    description = first.describe_ready()
    second = subprocess.run(
        COMMAND,
        env=os.environ | {"ZMQENGINE_DIR": str(Path(description.cmd.removeprefix("ipc://")).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert second.returncode == 1
    assert len(second.stderr.splitlines()) == 1
    assert "already running" in second.stderr
    assert first.describe_ready().epoch == description.epoch


@pytest.mark.parametrize("more", [(), ("--no-supervise",)], ids=["supervised", "alone"])
def test_die_with_parent_ends_what_a_killed_program_started(more: tuple[str, ...]) -> None:
    """SIGKILL of the program that started a worker for itself leaves no worker."""
    program = (
        "import subprocess, sys; child = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE); "
        "print(child.pid, child.stderr.readline().decode().split('address=')[1].split()[0], flush=True); "
        "child.wait()"
    )
    options = ("--bind", "tcp://127.0.0.1:0", "--die-with-parent", *more)
    command = [sys.executable, "-c", program, *COMMAND, *options]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started_pid, address = parent.stdout.readline().split()
    description = describe(address, within_ms=60_000)
    assert description is not None
    parent.kill()
    parent.wait()
    wait_until_dead(int(started_pid))
    wait_until_dead(description.pid)


def test_a_second_signal_ends_a_worker_that_drains(supervise: Callable[..., Supervised]) -> None:
    """The first lets the stream go on, the second ends it with `shutdown`; the code is still 0."""
    run = supervise("--engine", 'fake:{"step_ms": 20, "context_tokens": 1000000}', "--drain-timeout", "600")
    run.describe_ready()
    with Client(run.address()) as client:
        stream = client.generate_tokens([1, 2, 3], max_tokens=900_000)
        next(stream)
        run.process.terminate()
        wait_until(lambda: client.describe().state == "draining", "it does not drain")
        before = len(next(stream).tokens)
        assert before
        run.process.terminate()
        with pytest.raises(ShutDown) as ended:
            stream.read()
    assert ended.value.completion.finish == "shutdown"  # type: ignore[attr-defined]
    assert run.process.wait(WAIT_S) == 0, run.log


def test_a_hang_is_a_pause(supervise: Callable[..., Supervised]) -> None:
    """mlx-lm #1505, #1834: an engine that blocks for ever is ended by the watchdog, and the stream goes on.

    Each life of this worker blocks at its tenth step, so that the stream needs several.
    """
    engine = 'fake:{"faults": [{"place": "next", "action": "block", "index": 10}]}'
    run = supervise("--engine", engine, "--pass-timeout", "0.5", "--restarts-max", "100")
    run.describe_ready()
    with Client(run.address()) as client:
        completion = client.generate_tokens([1, 2, 3], max_tokens=20, seed=7).read()
    request = RowRequest(row=0, prompt=[1, 2, 3], max_tokens=20, seed=7)
    assert completion.tokens == expected_tokens(request)
    assert completion.resumed >= 2
    assert "most recent call first" in run.log
    assert "in run_pass" in run.log
    assert "the worker was killed by SIGALRM: starting it again" in run.log


def describe(address: str, within_ms: int = 1000) -> Description | None:
    """What the worker there says of itself, or None if it does not answer in time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send_multipart(encode(Describe(call=1)))
        if not socket.poll(within_ms):
            return None
        reply = control_reply_decoder().decode(socket.recv_multipart())
    assert isinstance(reply, Description)
    return reply
