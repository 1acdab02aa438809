"""No command and no child of one runs a file of the directory in which it is started."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.workers import wait_until
from tools import module_graph
from zmqengine.python_child import python_command, python_environment
from zmqengine_client import Client

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("zmqengine"))
START = ("__main__", "zmqengine", "sitecustomize", "usercustomize")
FAKE = 'fake:{"vocab_size": 257}'


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with a file of every name that can be imported. Each notes that it ran."""
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *START}
    for name in names:
        if name.isidentifier():
            (tmp_path / f"{name}.py").write_text(
                f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10))\nraise ImportError('planted')\n"
            )
    return tmp_path


def ran(planted: Path) -> str:
    """Names of the planted files that were executed."""
    return (planted / "ran").read_text() if (planted / "ran").exists() else ""


@pytest.mark.parametrize(
    ("module", "entries"),
    [
        ("zmqengine.worker", ""),
        ("zmqengine.worker", f"{ROOT}:"),
        ("zmqengine.worker", f":{ROOT}"),
        ("zmqengine.worker", f"{ROOT}::{ROOT}"),
        ("zmqengine.bench.device", f":{ROOT}"),
        ("zmqengine.cli.commands.demo.front_end", f":{ROOT}"),
    ],
)
def test_a_child_imports_nothing_from_there(
    planted: Path, module: str, entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever PYTHONPATH says: an empty entry of it names the current directory, too."""
    monkeypatch.setenv("PYTHONPATH", entries)
    done = subprocess.run(
        python_command(module, "--help"),
        cwd=planted,
        env=python_environment(),
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran(planted) == "", done.stderr
    assert "planted" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("name", ["worker", "serve", "http", "doctor"])
def test_a_command_runs_nothing_from_there(planted: Path, short_directory: str, name: str) -> None:
    """Installed, and started in a cloned repository: neither the command, nor a worker or a front-end of it."""
    # The interpreter of the command itself imports these, before any code of ours, where PYTHONPATH says so.
    for each in (*sys.stdlib_module_names, *START, "_distutils_hack"):
        (planted / f"{each}.py").unlink(missing_ok=True)
    for each in ("sitecustomize", "usercustomize"):
        note = f"import os\nopen({str(planted / each)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        (planted / f"{each}.py").write_text(note)
    port = str(free_port())
    arguments = {
        "worker": ["--engine", FAKE],
        "serve": ["pico", "--port", port],
        "http": ["--worker", f"ipc://{short_directory}/none/ctl", "--port", port, "--processes", "2"],
        "doctor": [],
    }[name]
    with (planted / "log").open("wb") as log:
        command = subprocess.Popen(
            [COMMAND, name, *arguments],
            cwd=planted, env=os.environ | {"PYTHONPATH": ":"}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        if name == "worker":
            with Client(f"ipc://{short_directory}/default/ctl", connect_timeout_s=60) as client:
                client.wait_ready(60)
        elif name != "doctor":
            wait_until(lambda: is_open(int(port)), "the front-end does not listen")
        if name != "doctor":
            command.send_signal(signal.SIGTERM)
        command.wait(100)
    finally:
        command.kill()
    assert ran(planted) == "", (planted / "log").read_text()
    # Its own interpreter's alone: no child's.
    assert (planted / "sitecustomize").read_text().split() == [str(command.pid)]


def is_open(port: int) -> bool:
    """Whether a server listens there."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_every_python_child_is_started_in_one_way() -> None:
    """`sys.executable` stands in one module."""
    for path in [*(ROOT / "zmqengine").rglob("*.py"), *(ROOT / "clients").rglob("*.py")]:
        if "executable" not in path.read_text("utf-8"):
            continue
        names = {
            ast.unparse(node) for node in ast.walk(module_graph.tree(path)) if isinstance(node, ast.Attribute)
        }
        assert "sys.executable" not in names or path.name == "python_child.py", path
