"""`zmqengine bench` as it is typed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from benchmarks.suite import run_suite
from tests.bench.reports import report_of
from tests.bench.sse_server import SseServer
from zmqengine.bench.reports.report import load, save
from zmqengine.bench.scenarios import SCENARIO_NAMES, scenario_named
from zmqengine.bench.targets.server_usage import listening_pid
from zmqengine.bench.targets.target import TargetError
from zmqengine.cli.commands.bench import bench
from zmqengine.errors import ConfigError, ZmqEngineError
from zmqengine.worker.process.parent import WORKER_CONFIG

START_TIMEOUT_S = 60.0


@pytest.fixture
def url() -> Iterator[str]:
    """A server on a loop of its own, in a thread of this process."""
    server, ready = SseServer({"m": [" a", " b"], "default": [" c"]}), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with server.running():
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(START_TIMEOUT_S)
    yield server.url
    loop.call_soon_threadsafe(stop.set)
    thread.join(START_TIMEOUT_S)
    assert not thread.is_alive()
    loop.close()


def type_in(*words: str) -> Result:
    return CliRunner().invoke(bench, list(words))


def test_two_servers_are_measured_side_by_side(url: str, tmp_path: Path) -> None:
    """A table, a report that says how to do it again, and a picture."""
    report_path, picture = tmp_path / "report.json", tmp_path / "picture.svg"
    result = type_in(
        *("serve", "--url", f"one={url}#m", "--url", url, "--size", "small", "--rounds", "2"),
        *("--set", "users=[1,2]", "--set", "requests_min=2"),
        *("--out", str(report_path), "--plot", str(picture), "--ranges"),
    )
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stdout
    report = load(report_path)
    assert report.labels() == ["one", url]
    assert report.cases("users") == ["1", "2"]
    assert report.options["requests_min"] == 2
    assert {"cpu", "cores", "memory"} <= report.machine.keys()
    assert {"python", "numpy"} <= report.versions.keys()
    assert picture.stat().st_size > 1000
    tokens = {cell.target: cell.measures["tokens"] / cell.measures["requests"] for cell in report.cells}
    assert tokens == {"one": 2, url: 1}
    shown = type_in("show", str(report_path))
    assert shown.exit_code == 0
    assert "users" in shown.stdout


def test_the_process_behind_a_url_of_this_machine_is_found(url: str) -> None:
    """So that its memory and processor time are in the report; for another machine there is nothing to find."""
    assert listening_pid(url) in (os.getpid(), None)
    assert listening_pid("http://192.0.2.1:80/v1") is None


def test_compare_prints_ratios_of_two_reports(tmp_path: Path) -> None:
    """With names matched by --same."""
    save(report_of({"ours": [100.0, 110.0]}), tmp_path / "a.json")
    save(report_of({"mine": [210.0, 220.0]}), tmp_path / "b.json")
    result = type_in("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--same", "ours=mine")
    assert result.exit_code == 0
    assert "x2.05" in result.stdout
    assert "better" in result.stdout


def test_a_model_is_made(tmp_path: Path) -> None:
    """Its directory is printed on standard output and nothing else is."""
    result = type_in("model", "--shape", "0.2m", "--out", str(tmp_path / "tiny"))
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve"], "nothing to measure"),
        (["serve", "--url", "127.0.0.1"], "give a URL like"),
        (["serve", "--url", "http://127.0.0.1:9/v1", "--set", "user=1"], "--set user: there is users"),
        (["serve", "--url", "http://127.0.0.1:9/v1", "--set", "users=x"], "--set"),
        (["serve", "--url", "http://127.0.0.1:9/v1", "--scenario", "users"], "cannot connect"),
        (["serve", "--start", "worker", "--model", "/nowhere"], "zmqengine bench model"),
    ],
)
def test_a_mistake_is_one_error_that_says_what_to_do(words: list[str], message: str) -> None:
    """Named errors, which the command line shows as one line."""
    result = type_in(*words)
    assert isinstance(result.exception, (ConfigError, ZmqEngineError))
    assert message in str(result.exception)


@pytest.mark.parametrize("name", SCENARIO_NAMES)
def test_a_scenario_is_found_by_its_name(name: str) -> None:
    """The module of that name holds it."""
    assert scenario_named(name).name == name


def test_help_imports_nothing_that_the_extra_brings() -> None:
    """Names of scenarios and shapes are there without numpy, httptools and matplotlib."""
    script = "import sys; from zmqengine.cli.commands import bench; print({*bench.NEEDED} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"


def test_an_unknown_part_of_the_suite_is_named(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(TargetError, match="unknown parts: nothing"):
        run_suite(tmp_path, None, only=["nothing"], on_progress=lambda text: None)


def test_a_started_worker_has_the_kernels_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare documented operations with kernels on the same work."""
    started = []

    def spawn(self: object, label: str, module: object, extra: dict[str, str]) -> None:
        started.append(msgspec.json.decode(extra[WORKER_CONFIG]))
        raise TargetError("the worker need not run")

    monkeypatch.setattr("zmqengine.bench.servers.started._Servers._spawn", spawn)
    for words, kernels in (((), "auto"), (("--kernels", "mlx"), "mlx")):
        result = type_in("serve", "--start", "worker", "--scenario", "chat", *words)
        assert isinstance(result.exception, TargetError)
        assert started.pop()["kernels"] == kernels
