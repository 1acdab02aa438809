"""deploy/smg: the script that puts a gateway in front of two workers over tcp with keys."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("smg", reason="the gateway is not installed")

from tests.support.ports import free_port
from tests.support.workers import wait_until
from zmqengine.engine.fake.fake_engine import FakeEngineConfig
from zmqengine.testing import FakeWorker
from zmqengine.worker.wire.keys import write_key_pair
from zmqengine_client import load_keys

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[2] / "deploy" / "smg" / "gateway.sh"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path that is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="zmqe-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def commands(directory: Path) -> str:
    """A PATH on which `zmqengine` and `smg` are those of this Python."""
    (directory / "bin").mkdir()
    for name, module in (("zmqengine", "zmqengine.cli.main"), ("smg", "smg")):
        command = directory / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        command.chmod(0o755)
    return f"{directory / 'bin'}:{os.environ['PATH']}"


def completion(port: int) -> int:
    """The status of one short completion; 0 if nobody listens yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read()).get("data")
        if not models:
            return 0
        body = json.dumps({"model": models[0]["id"], "prompt": "Hello", "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except (OSError, ValueError):
        return 0
    finally:
        connection.close()


@pytest.mark.slow
def test_the_script_serves_two_workers_behind_keys_and_ends_with_its_parts(directory: Path) -> None:
    """Keys as its page has them made; SIGTERM ends every process that it started."""
    keys = directory / "keys"
    keys.mkdir()
    for name in ("a", "b", "gateway"):
        write_key_pair(keys, name)
    authorized = directory / "authorized"
    authorized.mkdir()
    shutil.copy(keys / "gateway.key", authorized)
    workers = [
        FakeWorker(
            FakeEngineConfig(),
            process=True,
            bind="tcp://127.0.0.1:0",
            server_key=str(keys / f"{name}.key_secret"),
            authorized_keys=str(authorized),
            keys=load_keys(keys / "gateway.key_secret", keys / f"{name}.key"),
        )
        for name in ("a", "b")
    ]
    port = free_port()
    with workers[0], workers[1], (directory / "log").open("wb") as log:
        environment = os.environ | {
            "PATH": commands(directory),
            "WORKER_A": workers[0].address,
            "WORKER_B": workers[1].address,
            "KEYS": str(keys),
            "PORT_A": str(free_port()),
            "PORT_B": str(free_port()),
            "PORT": str(port),
        }
        options = ["--prometheus-port", str(free_port()), "--shutdown-grace-period-secs", "1"]
        options += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        script = subprocess.Popen(
            ["bash", str(SCRIPT), *options], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: script.poll() is not None or completion(port) == 200, "nothing is served")
            assert script.poll() is None, "the script has ended"
        finally:
            script.terminate()
            try:
                code = script.wait(60)
            finally:
                if script.poll() is None:
                    os.killpg(script.pid, signal.SIGKILL)
                print((directory / "log").read_text())  # pytest shows it with a failure
        assert code == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(script.pid, 0)


def test_the_script_says_what_it_lacks() -> None:
    """One line, and nothing is started."""
    environment = {"PATH": os.environ["PATH"]}
    ran = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "give the address of the first worker" in ran.stderr
