"""Addresses, rights and locks of the real sockets."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct
from pathlib import Path

import pytest
import zmq

from tests.support.workers import START_S
from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import Endpoints, tcp_host_port
from zmqengine.tcp_probes import PROBE_S
from zmqengine.worker.wire.descriptors import socket_at
from zmqengine.worker.wire.socket_files import hidden
from zmqengine.worker.wire.sockets import PROBES_MAX, Sockets


def ipc(directory: Path) -> Endpoints:
    return Endpoints(*(f"ipc://{directory}/{name}" for name in ("ctl", "cmd", "out")))


def tcp(port: int = 0) -> Endpoints:
    return Endpoints(*(f"tcp://127.0.0.1:{port}" for _ in range(3)))


def test_ipc_sockets_are_private_and_gone_after_close(tmp_path: Path) -> None:
    """Directory 0700, sockets 0600; a clean exit leaves nothing."""
    directory = tmp_path / "base" / "w"
    sockets = Sockets(ipc(directory), frame_bytes_max=4096)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    for name in ("ctl", "cmd", "out"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    sockets.close(linger_ms=0)
    assert not directory.exists()


def test_a_live_ipc_address_cannot_be_stolen(tmp_path: Path) -> None:
    """libzmq lets a second bind take a live ipc path over without a word: the lock does not."""
    first = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    with pytest.raises(ConfigError, match="already running"):
        Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    assert (tmp_path / "w" / "ctl").exists()
    first.close(linger_ms=0)
    again = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    again.close(linger_ms=0)


def test_socket_files_of_a_killed_worker_are_no_hindrance(tmp_path: Path) -> None:
    """Stale files without a lock are removed."""
    directory = tmp_path / "w"
    directory.mkdir(mode=0o700)
    for name in ("ctl", "cmd", "out"):
        (directory / name).touch()
    Sockets(ipc(directory), frame_bytes_max=4096).close(linger_ms=0)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """The error says what to do; nothing of the user's is changed."""
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Sockets(ipc(directory), frame_bytes_max=4096)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_port_zero_is_told_as_the_real_port() -> None:
    """tcp port 0: the address in `describe` is one that can be connected to."""
    sockets = Sockets(tcp(), frame_bytes_max=4096)
    ports = [int(address.rsplit(":", 1)[1]) for address in (sockets.endpoints.ctl, sockets.endpoints.cmd)]
    assert all(port > 0 for port in ports)
    assert len(set(ports)) == 2
    sockets.close(linger_ms=0)


def test_a_port_in_use_is_one_clear_error() -> None:
    """The message names the address and says what to do."""
    holder = zmq.Context()
    socket = holder.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigError, match=f"{port} is in use"):
        Sockets(tcp(port), frame_bytes_max=4096)
    holder.destroy(linger=0)


def test_a_directory_that_was_just_removed_is_not_taken_for_the_locked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock the holder may remove it: a lock on the dead directory would let two workers in."""
    directory = tmp_path / "w"
    first = Sockets(ipc(directory), frame_bytes_max=4096)
    real_open, opened = os.open, []

    def open_then_release(path: Path, *arguments: int) -> int:
        fd = real_open(path, *arguments)
        opened.append(fd)
        if len(opened) == 1:
            first.close(linger_ms=0)
        return fd

    monkeypatch.setattr(os, "open", open_then_release)
    second = Sockets(ipc(directory), frame_bytes_max=4096)
    monkeypatch.undo()
    assert len(opened) == 2
    with pytest.raises(ConfigError, match="already running"):
        Sockets(ipc(directory), frame_bytes_max=4096)
    second.close(linger_ms=0)


def keep(sockets: Sockets) -> None:
    """As the two threads of a worker do."""
    sockets.keep_ctl()
    sockets.keep_cmd_and_out()


def passes_through(peer: zmq.Socket[bytes], sockets: Sockets) -> bool:
    """Whether what `peer` sends arrives at cmd."""
    peer.send(b"x")
    arrived = sockets.cmd.poll(60_000) != 0
    sockets.cmd.recv_multipart()
    return arrived


@pytest.mark.parametrize("what", ["a file", "all files", "the directory"])
def test_what_was_removed_under_a_running_worker_is_there_again(tmp_path: Path, what: str) -> None:
    """Earlier connections stay, new ones find it, nobody else can take the name, and a clean exit leaves nothing."""
    directory = tmp_path / "w"
    sockets = Sockets(ipc(directory), frame_bytes_max=4096)
    context = zmq.Context()
    before, after = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    before.connect(sockets.endpoints.cmd)
    assert passes_through(before, sockets)
    if what == "the directory":
        shutil.rmtree(directory)
    for path in sockets.files[1:2] if what == "a file" else sockets.files:
        path.unlink(missing_ok=True)
    keep(sockets)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, *sockets.files)]
    assert modes == [0o700, 0o600, 0o600, 0o600]
    after.connect(sockets.endpoints.cmd)
    assert passes_through(after, sockets)
    assert passes_through(before, sockets)
    with pytest.raises(ConfigError, match="already running"):
        Sockets(ipc(directory), frame_bytes_max=4096)
    inodes = [path.stat().st_ino for path in sockets.files]
    keep(sockets)
    assert [path.stat().st_ino for path in sockets.files] == inodes
    context.destroy(linger=0)
    sockets.close(linger_ms=0)
    assert not directory.exists()


def test_live_sockets_are_not_stolen_where_the_lock_is_gone(tmp_path: Path) -> None:
    """Somebody listens there, so they are no leftovers of a dead worker."""
    directory = tmp_path / "w"
    first = Sockets(ipc(directory), frame_bytes_max=4096)
    directory.rename(tmp_path / "away")
    directory.mkdir(mode=0o700)
    for path in first.files:
        (tmp_path / "away" / path.name).rename(path)
    with pytest.raises(ConfigError, match="already running"):
        Sockets(ipc(directory), frame_bytes_max=4096)
    assert all(path.exists() for path in first.files)
    first.close(linger_ms=0)


def test_a_worker_whose_name_was_taken_leaves_its_heir_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its look nor its end removes a file of the other, and it says once that nobody finds it."""
    first = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    shutil.rmtree(tmp_path / "w")
    second = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    inodes = [path.stat().st_ino for path in second.files]
    for _ in range(3):
        keep(first)
        first.touch()
    first.close(linger_ms=0)
    assert [path.stat().st_ino for path in second.files] == inodes
    assert caplog.text.count("another worker has its name") == 1
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(second.endpoints.cmd)
    assert passes_through(peer, second)
    context.destroy(linger=0)
    second.close(linger_ms=0)


def test_closed_doors_are_no_removed_file(tmp_path: Path) -> None:
    """While there are too many connections the files have another name, and stay so."""
    sockets = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    for path in sockets.files:
        path.rename(hidden(path))
    keep(sockets)
    assert not any(path.exists() for path in sockets.files)
    for path in sockets.files:
        hidden(path).rename(path)
    sockets.close(linger_ms=0)


def test_a_file_that_cannot_be_restored_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker serves on, and tries again."""
    sockets = Sockets(ipc(tmp_path / "w"), frame_bytes_max=4096)
    shutil.rmtree(tmp_path / "w")

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", no_room)
        for _ in range(3):
            sockets.keep_ctl()
    assert caplog.text.count("cannot restore a socket file") == 1
    sockets.keep_ctl()
    assert sockets.files[0].exists()
    sockets.close(linger_ms=0)


def test_a_tcp_connection_is_probed_by_the_system_and_not_by_libzmq() -> None:
    """A heartbeat on a connection that was lost while its commands wait would end the process."""
    sockets = Sockets(tcp(), frame_bytes_max=4096)
    try:
        for ours, monitor in zip((sockets.ctl, sockets.cmd, sockets.out), sockets.monitors, strict=True):
            assert ours.getsockopt(zmq.HEARTBEAT_IVL) == 0
            _, port = tcp_host_port(ours.getsockopt_string(zmq.LAST_ENDPOINT))
            with socket.create_connection(("127.0.0.1", port)):
                assert monitor.poll(int(START_S * 1000)), "the connection is not accepted"
                _, fd = struct.unpack("=HI", monitor.recv_multipart()[0])
                with socket_at(fd) as accepted:
                    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == PROBE_S
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == PROBES_MAX
    finally:
        sockets.close(linger_ms=0)
