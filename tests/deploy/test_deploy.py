"""The files in deploy/, by their formats' own checkers and by the command line that they call."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zmqengine.cli.main import zmqengine
from zmqengine.config import WorkerConfig
from zmqengine.worker.parent import EXIT_HOPELESS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PLIST = DEPLOY / "launchd" / "org.zmqengine.worker.plist"
UNIT = DEPLOY / "systemd" / "zmqengine@.service"
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
MANIFEST = DEPLOY / "kubernetes" / "worker.yaml"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """The configurations that unsupervised workers were started with; none really starts."""
    configs: list[WorkerConfig] = []

    def serve(config: WorkerConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("zmqengine.worker.main.serve", serve)
    return configs


def run(arguments: list[str]) -> None:
    """Call the command line."""
    result = CliRunner().invoke(zmqengine, arguments, standalone_mode=False)
    assert result.exception is None, result.exception


def test_the_launchd_job_is_a_valid_property_list() -> None:
    """plistlib reads it everywhere, and plutil checks it on macOS."""
    job = plistlib.loads(PLIST.read_bytes())
    assert job["Label"] == PLIST.stem
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ExitTimeOut"] > WorkerConfig().drain_timeout_s
    if shutil.which("plutil"):
        subprocess.run(["plutil", "-lint", str(PLIST)], check=True)


def test_the_launchd_job_runs_an_unsupervised_worker(served: list[WorkerConfig]) -> None:
    """Its arguments are ones that our command line takes."""
    _, *arguments = plistlib.loads(PLIST.read_bytes())["ProgramArguments"]
    run(arguments)
    assert [config.supervise for config in served] == [False]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_has_no_complaint_about_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with a program that exists."""
    unit = UNIT.read_text().replace("%h/.local/bin/zmqengine", sys.executable)
    (tmp_path / UNIT.name).write_text(unit)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(tmp_path / UNIT.name)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_unit_runs_an_unsupervised_worker_of_its_instances_name(served: list[WorkerConfig]) -> None:
    """systemd supervises, and leaves down what would fail again."""
    values = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    _, *arguments = shlex.split(values["ExecStart"].replace("%i", "one"))
    run(arguments)
    assert [(config.supervise, config.name) for config in served] == [(False, "one")]
    assert values["RestartPreventExitStatus"] == f"2 {EXIT_HOPELESS}"
    assert int(values["TimeoutStopSec"]) > WorkerConfig().drain_timeout_s


def test_the_image_is_built_from_files_and_extras_that_exist(served: list[WorkerConfig]) -> None:
    """Every COPY has its source, and every ENGINE an extra of pyproject.toml."""
    text = DOCKERFILE.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    _, extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")
    assert {"worker", "cuda", "http"} <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    command = re.findall(r"^CMD \[(.+)\]$", text, re.MULTILINE)[0]
    run([word.strip().strip('"') for word in command.split(",")])
    assert [config.supervise for config in served] == [False]


def test_the_manifest_runs_commands_that_exist(served: list[WorkerConfig]) -> None:
    """The pod's worker starts with its arguments, and every probe and front-end is a command of ours."""
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]["spec"]
    worker, http = pod["containers"]
    run(worker["args"])
    assert [config.supervise for config in served] == [False]
    assert pod["terminationGracePeriodSeconds"] > WorkerConfig().drain_timeout_s
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    for probe in ("livenessProbe", "readinessProbe"):
        program, *arguments = worker[probe]["exec"]["command"]
        assert program == "zmqengine"
        run([*arguments, "--help"])
    run([*http["args"], "--help"])
