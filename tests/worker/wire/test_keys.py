"""Key files, and the command that makes them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth

from zmqengine.cli.main import main
from zmqengine.errors import ConfigError
from zmqengine.worker.wire.keys import load_key_pair, load_public_key, write_key_pair


def test_a_new_pair_is_read_by_us_and_by_zmq_auth(tmp_path: Path) -> None:
    """The files are ZeroMQ certificates, and the two keys belong together."""
    files = write_key_pair(tmp_path / "new", "alice")
    pair = load_key_pair(files.secret)
    assert zmq.auth.load_certificate(files.secret) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(files.public) == (pair.public, None)
    assert load_public_key(files.public) == pair.public == zmq.curve_public(pair.secret)


def test_the_secret_is_its_owners_only_and_is_never_shown(tmp_path: Path) -> None:
    """0600 whatever the umask, and no repr that a log could hold."""
    earlier = os.umask(0)
    try:
        files = write_key_pair(tmp_path, "alice")
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(files.secret.stat().st_mode) == 0o600
    pair = load_key_pair(files.secret)
    assert pair.secret.decode() not in repr(pair)


@pytest.mark.parametrize("existing", ["alice.key", "alice.key_secret"])
def test_keygen_overwrites_nothing(tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a pair that exists stops the whole, with one line that says what to do."""
    (tmp_path / existing).write_text("mine")
    assert main(["keygen", "alice", "--directory", str(tmp_path)]) != 0
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "mine"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "another name" in captured.err
    assert captured.err.count("\n") == 1


def test_keygen_prints_the_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a script needs is on standard output, the public file first."""
    assert main(["keygen", "alice", "--directory", str(tmp_path)]) == 0
    public, secret = capsys.readouterr().out.splitlines()
    assert load_public_key(public) == load_key_pair(secret).public


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65, "a b", 'a"b', "a\n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    """A name cannot lead out of the directory nor break the file's format."""
    with pytest.raises(ConfigError, match="cannot name a key"):
        write_key_pair(tmp_path, name)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """No traceback for a person who mistyped a path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write keys"):
        write_key_pair(tmp_path / "file" / "below", "alice")


def test_a_secret_key_that_everybody_can_read_is_not_used(tmp_path: Path) -> None:
    """Whoever copied it could pose as the worker."""
    files = write_key_pair(tmp_path, "alice")
    files.secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_pair(files.secret)


def test_what_is_no_key_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """A missing file, the public half, some other file, a damaged key, bytes."""
    files = write_key_pair(tmp_path, "alice")
    with pytest.raises(ConfigError, match=r"no secret key.*\.key_secret"):
        load_key_pair(files.public)
    with pytest.raises(ConfigError, match="no such file"):
        load_key_pair(tmp_path / "missing")
    for contents in (b"", b"public-key = short", b"public-key = " + b"'" * 40, b"\xff\xfe\x00" * 100):
        (tmp_path / "other.key").write_bytes(contents)
        with pytest.raises(ConfigError, match=r"other\.key"):
            load_public_key(tmp_path / "other.key")
