"""CURVE keys: from files, from the environment, and on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from zmqengine.errors import ConfigError, NotAuthorized, WorkerLost
from zmqengine.testing import FakeWorker
from zmqengine_client import Client, CurveKeys, load_keys
from zmqengine_client.keys import keys_from_environment

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq has no CURVE here")


def certificates(directory: Path, *names: str) -> None:
    """Key files as `zmqengine keygen` writes them."""
    directory.mkdir(exist_ok=True)
    for name in names:
        _, secret = zmq.auth.create_certificates(directory, name)
        Path(secret).chmod(0o600)


def test_keys_come_from_files(tmp_path: Path) -> None:
    """The own secret file, and the worker's public file or key."""
    certificates(tmp_path, "me", "worker")
    keys = load_keys(tmp_path / "me.key_secret", tmp_path / "worker.key")
    public, _ = zmq.auth.load_certificate(tmp_path / "worker.key")
    assert keys == load_keys(tmp_path / "me.key_secret", public.decode())
    assert keys.server_key == public
    assert keys.secret_key.decode() not in repr(keys)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """As ssh does; the error says what to do."""
    certificates(tmp_path, "me", "worker")
    (tmp_path / "me.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(tmp_path / "me.key_secret", tmp_path / "worker.key")


@pytest.mark.parametrize("client_key", ["me.key", "nobody.key_secret", "not a key"])
def test_a_file_that_is_no_secret_key_is_named(tmp_path: Path, client_key: str) -> None:
    """One line that says which file."""
    certificates(tmp_path, "me", "worker")
    (tmp_path / "not a key").write_text("hello")
    with pytest.raises(ConfigError, match=client_key):
        load_keys(tmp_path / client_key, tmp_path / "worker.key")


def test_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variables, or none."""
    certificates(tmp_path, "me", "worker")
    assert keys_from_environment() is None
    monkeypatch.setenv("ZMQENGINE_CLIENT_KEY", str(tmp_path / "me.key_secret"))
    with pytest.raises(ConfigError, match="ZMQENGINE_SERVER_KEY"):
        keys_from_environment()
    monkeypatch.setenv("ZMQENGINE_SERVER_KEY", str(tmp_path / "worker.key"))
    assert keys_from_environment() == load_keys(tmp_path / "me.key_secret", tmp_path / "worker.key")


def test_what_is_no_key_is_refused() -> None:
    """The length is checked before libzmq sees it."""
    with pytest.raises(ConfigError, match="server_key"):
        CurveKeys(b"x" * 40, b"x" * 40, b"short")


def test_only_an_authorized_key_gets_through(connect: Callable[..., Any], tmp_path: Path) -> None:
    """All three sockets use the keys; a stranger is told, and so is one who takes the worker for another."""
    certificates(tmp_path / "keys", "worker", "me", "stranger")
    (tmp_path / "authorized").mkdir()
    (tmp_path / "authorized" / "me.key").write_bytes((tmp_path / "keys" / "me.key").read_bytes())
    own = load_keys(tmp_path / "keys" / "me.key_secret", tmp_path / "keys" / "worker.key")
    stranger = load_keys(tmp_path / "keys" / "stranger.key_secret", tmp_path / "keys" / "worker.key")
    mistaken = load_keys(tmp_path / "keys" / "me.key_secret", tmp_path / "keys" / "stranger.key")
    with FakeWorker(
        process=True,
        keys=own,
        bind="tcp://127.0.0.1:0",
        server_key=str(tmp_path / "keys" / "worker.key_secret"),
        authorized_keys=str(tmp_path / "authorized"),
    ) as worker:

        async def scenario() -> None:
            async with connect(worker.address, keys=own) as client:
                assert len((await client.generate("a", max_tokens=5).read()).tokens) == 5
            async with connect(worker.address, keys=stranger) as client:
                # Whoever asks again has been refused before it asked.
                for _ in range(2):
                    with pytest.raises(NotAuthorized, match="key"):
                        await client.describe()
                    with pytest.raises(NotAuthorized, match="key"):
                        await client.generate_tokens([1], max_tokens=1).read()
                (tmp_path / "authorized" / "stranger.key").write_bytes(
                    (tmp_path / "keys" / "stranger.key").read_bytes()
                )
                assert len((await client.generate_tokens([1], max_tokens=3).read()).tokens) == 3
            async with connect(worker.address, keys=mistaken, connect_timeout_s=1.0) as client:
                with pytest.raises(WorkerLost):
                    await client.describe()
            async with connect(worker.address, connect_timeout_s=1.0) as client:
                with pytest.raises(WorkerLost):
                    await client.generate_tokens([1]).read()

        asyncio.run(scenario())


def test_keys_from_the_environment_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong file is an error when the client is made."""
    monkeypatch.setenv("ZMQENGINE_CLIENT_KEY", str(tmp_path / "gone"))
    monkeypatch.setenv("ZMQENGINE_SERVER_KEY", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone"):
        Client()
