"""Addresses, rights and locks of the real sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from zmqengine.errors import ConfigError
from zmqengine.protocol.addresses import Endpoints
from zmqengine.worker.wire.sockets import Sockets


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
    for name in ("ctl", "cmd", "out", "lock"):
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


def test_a_lock_file_that_was_just_unlinked_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock the holder may unlink the file: a lock on the dead file would let two workers in."""
    directory = tmp_path / "w"
    first = Sockets(ipc(directory), frame_bytes_max=4096)
    real_open, opened = os.open, []

    def open_then_release(path: Path, *arguments: int) -> int:
        fd = real_open(path, *arguments)
        opened.append(fd)
        if len(opened) == 1:
            first.close(linger_ms=0)
            directory.mkdir(mode=0o700, exist_ok=True)
        return fd

    monkeypatch.setattr(os, "open", open_then_release)
    second = Sockets(ipc(directory), frame_bytes_max=4096)
    monkeypatch.undo()
    assert len(opened) == 2
    with pytest.raises(ConfigError, match="already running"):
        Sockets(ipc(directory), frame_bytes_max=4096)
    second.close(linger_ms=0)
