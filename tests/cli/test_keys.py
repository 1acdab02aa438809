"""Keys, from `zmqengine keygen` to a request, over tcp."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND
from tests.support.workers import wait_until

LISTENING = re.compile(r"listening address=(\S+)")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keys(tmp_path: Path, run: Run) -> Path:
    """Key pairs of a worker, of a friend that it knows and of a stranger."""
    for name in ("worker", "friend", "stranger"):
        made = run("keygen", name, "--directory", str(tmp_path))
        assert made.returncode == 0, made.stderr
        assert made.stdout.splitlines() == [
            str(tmp_path / f"{name}.key"),
            str(tmp_path / f"{name}.key_secret"),
        ]
        assert stat.S_IMODE((tmp_path / f"{name}.key_secret").stat().st_mode) == 0o600
    (tmp_path / "authorized").mkdir()
    shutil.copy(tmp_path / "friend.key", tmp_path / "authorized")
    return tmp_path


@pytest.fixture
def address(keys: Path) -> Iterator[str]:
    """A worker that knows the friend only."""
    log = keys / "log"
    options = ["--bind", "tcp://127.0.0.1:0", "--server-key", str(keys / "worker.key_secret")]
    options += ["--authorized-keys", str(keys / "authorized"), "--engine", "fake:{}", "--no-supervise"]
    with log.open("w") as stderr:
        process = subprocess.Popen([*COMMAND, "worker", *options], stderr=stderr)
    wait_until(lambda: LISTENING.search(log.read_text()) or process.poll(), "it does not listen")
    found = LISTENING.search(log.read_text())
    assert found is not None, log.read_text()
    yield found[1]
    process.kill()
    process.wait()


def test_a_key_that_the_worker_knows_opens_it(address: str, keys: Path, run: Run) -> None:
    """By option, as by environment."""
    options = ("-w", address, "--server-key", str(keys / "worker.key"))
    answered = run("generate", *options, "--client-key", str(keys / "friend.key_secret"), "-n", "5", "Once")
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout


@pytest.mark.parametrize("options", [("stranger",), ()], ids=["a key it does not know", "no key"])
def test_a_stranger_gets_no_answer_and_one_line(
    address: str, keys: Path, run: Run, options: tuple[str, ...]
) -> None:
    """Never the model, never a traceback."""
    given = ["--server-key", str(keys / "worker.key"), "--client-key"] if options else []
    given += [str(keys / f"{name}.key_secret") for name in options]
    refused = run("status", "-w", address, "--timeout", "1", *given)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--client-key", "/nowhere"), "belong together"),
        (("--client-key", "/nowhere", "--server-key", "/nowhere"), "cannot read the key file /nowhere"),
    ],
)
def test_keys_that_are_not_there_are_bad_usage(options: tuple[str, ...], said: str, run: Run) -> None:
    """One line that names the file or the option, and code 2."""
    refused = run("status", *options)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
