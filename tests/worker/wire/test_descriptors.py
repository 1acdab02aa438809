"""The limit on open files: raised at the start, and never reached by connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.workers import START_S, wait_until
from zmqengine.errors import ZmqEngineError
from zmqengine.protocol.addresses import Endpoints
from zmqengine.worker.wire import connection_limiter as limiter_module
from zmqengine.worker.wire.connection_limiter import doors_of
from zmqengine.worker.wire.descriptors import RESERVED, ConnectionBounds, files_open, lowest_free
from zmqengine.worker.wire.sockets import Sockets
from zmqengine_client import AsyncClient, Client

HARD = 1024


@pytest.mark.parametrize("files_max", [64, 128, 256, 1024, 4096, 20_000, 1 << 20])
def test_there_is_always_room_between_the_bound_and_the_limit(files_max: int) -> None:
    """What comes in after the bound is reached, the queues of all three sockets included, stays below the limit."""
    bounds = ConnectionBounds.within(files_max, 20)
    assert bounds.connections_max >= 1
    assert bounds.backlog >= 1
    if files_max > 128:
        assert bounds.connections_max + 4 * bounds.backlog + RESERVED + 20 < files_max


def test_sessions_that_do_not_fit_are_told_in_one_line() -> None:
    """The line says how many do, and what to change."""
    line = ConnectionBounds.within(1024, 20).check(256, 1024)
    assert line is not None
    assert "\n" not in line
    assert "--sessions-max 256" in line
    assert "ulimit -n" in line
    assert ConnectionBounds.within(20_000, 20).check(256, 20_000) is None


@pytest.fixture
def directory() -> Iterator[Path]:
    """A path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ze-") as path:
        yield Path(path)


def test_a_flood_at_one_socket_closes_the_doors_of_all(directory: Path) -> None:
    """Whatever the monitors have not told of yet counts as well: it is in the table of descriptors."""
    names = ("ctl", "cmd", "out")
    sockets = Sockets(Endpoints(*(f"ipc://{directory}/w/{name}" for name in names)), frame_bytes_max=4096)
    connections: list[socket.socket] = []
    doors = doors_of(sockets.monitors, sockets.files, connections_max=6)
    try:
        full = files_open() + RESERVED + 6
        while lowest_free() < full:
            connection = _connect(f"ipc://{directory}/w/cmd")
            assert connection is not None
            connections.append(connection)
        # The flooded one last: it shuts down those beyond its share, which leaves room for the others' doors.
        for door in (doors[0], doors[2], doors[1]):
            door.check()
        assert not any((directory / "w" / name).exists() for name in names)
    finally:
        for connection in connections:
            connection.close()
        for door in doors:
            door.open()
        sockets.close(linger_ms=0)


@pytest.mark.parametrize("waiting", [0, 3, 30])
def test_each_socket_has_a_third_whatever_comes_to_the_others(directory: Path, waiting: int) -> None:
    """A front-end needs one connection at each: who is let in at ctl is let in at cmd and out, too."""
    names = ("ctl", "cmd", "out")
    sockets = Sockets(Endpoints(*(f"ipc://{directory}/w/{name}" for name in names)), frame_bytes_max=4096)
    doors = doors_of(sockets.monitors, sockets.files, connections_max=12)
    connections: list[socket.socket] = []

    def come_to(number: int) -> bool:
        connection = _connect(f"ipc://{directory}/w/{names[number]}")
        if connection is None:
            return False
        connections.append(connection)
        wait_until(lambda: _has_news(sockets.monitors[number]), "the connection was not told of")
        doors[number].check()
        return True

    try:
        assert [come_to(0) for _ in range(4 + waiting)] == [True] * 4 + [False] * waiting
        for number in (1, 2):
            assert [come_to(number) for _ in range(5)] == [True] * 4 + [False]
        assert [len(door.connections) for door in doors] == [4, 4, 4]
        connections.pop().close()
        wait_until(lambda: _has_news(sockets.monitors[2]), "the end was not told of")
        wait_until(lambda: doors[2].check() or (directory / "w" / "out").exists(), "the door stays closed")
        assert come_to(2)
    finally:
        for connection in connections:
            connection.close()
        for door in doors:
            door.open()
        sockets.close(linger_ms=0)


def _has_news(monitor: zmq.Socket[bytes]) -> bool:
    return bool(int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def test_doors_close_and_open_where_no_file_can_be_opened(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look needs a descriptor: without one the answer is that there is no room."""
    monkeypatch.setattr(limiter_module, "CLOSED_S", 0.0)
    path = directory / "ctl"
    path.touch()
    pair: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    (door,) = doors_of([pair], [path], connections_max=3000)
    door.check()
    assert path.exists()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(), before[1]))
    try:
        door.check()
        is_open = path.exists()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not is_open
    door.check()
    assert path.exists()
    pair.close(0)


class LimitedWorker:
    """A worker on the fake engine in a process with these limits on open files."""

    def __init__(self, soft: int, hard: int, *, tcp: bool = False, **options: object) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ze-"))
        options = {
            "engine": "fake:{}",
            "supervise": False,
            "die_with_parent": True,
            "bind": "tcp://127.0.0.1:0" if tcp else f"ipc://{self.directory}/w/ctl",
        } | options
        program = (
            "import sys, resource\n"
            f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
            "from zmqengine.config import WorkerConfig\n"
            "from zmqengine.worker.main import serve\n"
            "sys.exit(serve(WorkerConfig.from_json(sys.argv[1])))\n"
        )
        self.log_path = self.directory / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, msgspec.json.encode(options).decode()], stderr=log
            )
        wait_until(
            lambda: " ready " in self.log or self.process.poll() is not None, "the worker is not ready"
        )
        self.address = self.log.split("address=")[1].split()[0]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def files_open(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def client(self) -> Client:
        return Client(self.address, connect_timeout_s=START_S, answer_timeout_s=START_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(START_S)
        # Shown with a test that fails.
        print(f"exit code {self.process.returncode}, log:\n{self.log[-3000:]}")
        for path in (self.directory / "w").glob("*"):
            path.unlink()
        with contextlib.suppress(OSError):
            (self.directory / "w").rmdir()
        self.log_path.unlink()
        self.directory.rmdir()


@pytest.fixture
def raised() -> Iterator[None]:
    """This process may hold the other ends of thousands of connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the descriptors of another process")
@pytest.mark.usefixtures("raised")
@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.process)], ids=["ipc", "tcp"])
def test_thousands_of_idle_connections_end_no_worker(*, tcp: bool) -> None:
    """2,400 connections under a hard limit of 1024: the same process, tokens for a client that was there before, and
    for one that comes when they are gone."""
    worker = LimitedWorker(HARD, HARD, tcp=tcp)
    idle: list[socket.socket] = []
    try:
        with worker.client() as client:
            client.wait_ready()
            stream = client.generate_tokens([1, 2, 3], max_tokens=50, seed=1)
            expected = stream.read().tokens
            description = client.describe()
            addresses = [worker.address, description.cmd, description.out]
            for index in range(2400):
                connection = _connect(addresses[index % 3])
                if connection is not None:
                    idle.append(connection)
                assert worker.process.poll() is None, worker.log[-2000:]
            assert len(idle) > 100
            if not tcp:
                # libzmq takes a full table of descriptors calmly on tcp, and aborts on ipc.
                assert worker.files_open() < HARD - 20
            assert client.generate_tokens([1, 2, 3], max_tokens=50, seed=1).read().tokens == expected
            for connection in idle:
                connection.close()
            wait_until(lambda: worker.files_open() < 100, "the descriptors of idle connections are kept")
            with worker.client() as newcomer:
                assert newcomer.generate_tokens([1, 2, 3], max_tokens=50, seed=1).read().tokens == expected
        assert worker.process.poll() is None, worker.log[-2000:]
        assert len(worker.log) < 200_000
    finally:
        for connection in idle:
            connection.close()
        worker.close()


def _connect(address: str) -> socket.socket | None:
    """One more idle connection; None if it is not let in."""
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    connection = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET, socket.SOCK_STREAM)
    # On this machine at once, or not before the next try of the system, a second later.
    connection.settimeout(1)
    try:
        connection.connect(place if kind == "ipc" else (host, int(port)))
    except OSError:
        connection.close()
        return None
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another system")
@pytest.mark.usefixtures("raised")
def test_a_hundred_front_ends_are_served_under_a_soft_limit_of_256() -> None:
    """What macOS starts programs with: the worker raises it, and serves all of them at once."""
    worker = LimitedWorker(256, 4096)
    clients: list[Client] = []
    try:
        for _ in range(100):
            clients.append(worker.client())
        streams = [client.generate_tokens([1, 2, 3], max_tokens=5, seed=1) for client in clients]
        outputs = {tuple(stream.read().tokens) for stream in streams}
        assert len(outputs) == 1
        assert worker.files_open() > 256
        assert worker.process.poll() is None, worker.log[-2000:]
    finally:
        for client in clients:
            client.close()
        worker.close()


def test_a_worker_that_is_short_of_descriptors_says_how_many_front_ends_fit() -> None:
    """One line at the start, and it serves."""
    worker = LimitedWorker(200, 200)
    try:
        with worker.client() as client:
            assert len(client.generate_tokens([1, 2, 3], max_tokens=5).read().tokens) == 5
        (line,) = [line for line in worker.log.splitlines() if "--sessions-max" in line]
        assert "front-ends" in line
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another system")
@pytest.mark.usefixtures("raised")
@pytest.mark.parametrize("clients", [30, pytest.param(120, marks=pytest.mark.process)])
def test_many_front_ends_under_few_descriptors_are_served_as_well_as_few(clients: int) -> None:
    """At once: those that fit are served, and the others do not take what these need."""
    worker = LimitedWorker(512, 512, peer_share=1.0, sessions_max=1000)
    fit = ConnectionBounds.within(512, worker.files_open()).connections_max // 3
    assert 30 <= fit < 120

    async def use(client: AsyncClient) -> bool:
        try:
            return len((await client.generate_tokens([1, 2, 3], max_tokens=5).read()).tokens) == 5
        except ZmqEngineError:
            return False

    async def served(wanted: int) -> int:
        """How many were, once that is as many as it has to be: the others wait for a connection that does not come."""
        made = [AsyncClient(worker.address, connect_timeout_s=START_S) for _ in range(clients)]
        uses = [asyncio.ensure_future(use(client)) for client in made]
        count = 0
        try:
            for ended in asyncio.as_completed(uses):
                count += await ended
                if count >= wanted:
                    break
            return count
        finally:
            for each in uses:
                each.cancel()
            await asyncio.gather(*uses, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in made))

    try:
        wanted = int(min(clients, fit) * 0.9)
        assert asyncio.run(served(wanted)) >= wanted
        assert worker.process.poll() is None, worker.log[-2000:]
    finally:
        worker.close()
