"""The files in deploy/, by their formats' own checkers and by the command line that they call."""

from __future__ import annotations

import dataclasses
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.support.workers import wait_until
from zmqengine.cli.main import zmqengine
from zmqengine.config import WorkerConfig
from zmqengine.errors import ConfigError
from zmqengine.worker.process.parent import EXIT_HOPELESS
from zmqengine_http import HttpConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PLIST = DEPLOY / "launchd" / "org.zmqengine.worker.plist"
HTTP_PLIST = DEPLOY / "launchd" / "org.zmqengine.http.plist"
UNIT = DEPLOY / "systemd" / "zmqengine@.service"
SYSTEM_UNITS = sorted((DEPLOY / "systemd" / "system").glob("*.service"))
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
MANIFEST = DEPLOY / "kubernetes" / "worker.yaml"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
FORMULA = DEPLOY / "homebrew" / "zmqengine.rb"
LAUNCHD_KEYS = {
    "Label", "ProgramArguments", "EnvironmentVariables", "RunAtLoad", "KeepAlive", "ThrottleInterval", "ExitTimeOut",
    "ProcessType", "StandardErrorPath", "StandardOutPath", "WorkingDirectory", "SoftResourceLimits",
    "HardResourceLimits", "Umask", "Nice", "UserName",
}  # fmt: skip
"""Of launchd.plist(5): a key that launchd does not know is passed over without a word."""
EXPOSURE_MAX = {"zmqengine-worker@.service": 1.9, "zmqengine-http.service": 1.6}
"""As `systemd-analyze security` scores them, from 0 to 10, less is better; deploy/README.md states them."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """The configurations that workers were started with; none really starts."""
    configs: list[WorkerConfig] = []

    def serve(config: WorkerConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("zmqengine.worker.main.serve", serve)
    monkeypatch.setattr("zmqengine.worker.process.supervisor.supervise", serve)
    return configs


def run(arguments: list[str]) -> None:
    """Call the command line."""
    result = CliRunner().invoke(zmqengine, arguments, standalone_mode=False)
    assert result.exception is None, result.exception


def command_of(path: Path) -> list[str]:
    """What the shell of a launchd job runs."""
    _, _, _, _, *command = plistlib.loads(path.read_bytes())["ProgramArguments"]
    return [str(word) for word in command]


@pytest.mark.parametrize("path", [PLIST, HTTP_PLIST], ids=lambda path: path.stem)
def test_the_launchd_job_is_a_valid_property_list(path: Path) -> None:
    """plistlib reads it everywhere, and plutil checks it on macOS."""
    job = plistlib.loads(path.read_bytes())
    assert job["Label"] == path.stem
    assert set(job) <= LAUNCHD_KEYS
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ExitTimeOut"] > WorkerConfig().drain_timeout_s
    if shutil.which("plutil"):
        subprocess.run(["plutil", "-lint", str(path)], check=True)


@pytest.mark.parametrize("path", [PLIST, HTTP_PLIST], ids=lambda path: path.stem)
@pytest.mark.parametrize(("ends", "code"), [("0", 0), ("1", 1), ("2", 0), ("78", 0), ("term", 5)])
def test_the_shell_of_a_launchd_job_logs_and_never_asks_for_what_would_fail_again(
    path: Path, ends: str, code: int, tmp_path: Path
) -> None:
    """launchd starts again what ends with another code than 0. SIGTERM reaches the program, which may take its time."""
    logs = tmp_path / "Library" / "Logs"
    logs.mkdir(parents=True)
    program = (
        "import signal, sys, time\n"
        "def stop(*_): time.sleep(0.2); print('drained', file=sys.stderr, flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('started', file=sys.stderr, flush=True)\n"
        "time.sleep(600) if sys.argv[1] == 'term' else sys.exit(int(sys.argv[1]))\n"
    )
    shell = plistlib.loads(path.read_bytes())["ProgramArguments"][:4]
    job = subprocess.Popen([*shell, sys.executable, "-c", program, ends], env={"HOME": str(tmp_path)})
    log = logs / f"{shell[3]}.log"
    wait_until(lambda: log.exists() and "started" in log.read_text(), "the job does not start")
    if ends == "term":
        job.terminate()
    assert job.wait(60) == code
    assert log.read_text() == ("started\ndrained\n" if ends == "term" else "started\n")


def test_the_launchd_job_runs_an_unsupervised_worker(served: list[WorkerConfig]) -> None:
    """Its arguments are ones that our command line takes."""
    run(command_of(PLIST)[1:])
    assert [config.supervise for config in served] == [False]


def test_the_launchd_job_of_the_front_end_is_a_command_of_ours() -> None:
    """Its arguments are taken, and its variables are options."""
    job = plistlib.loads(HTTP_PLIST.read_bytes())
    run([*command_of(HTTP_PLIST)[1:], "--print-config"])
    assert set(job["EnvironmentVariables"]) <= {
        f"ZMQENGINE_HTTP_{field.name.upper()}" for field in dataclasses.fields(HttpConfig)
    }


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("unit", SYSTEM_UNITS, ids=lambda unit: unit.name)
def test_units_for_servers_are_valid_and_as_locked_as_stated(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` says nothing, and `security` no more than deploy/README.md."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/zmqengine/bin/zmqengine", sys.executable))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    scored = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", scored.stdout)
    assert exposure, scored.stdout + scored.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX[unit.name]
    assert str(EXPOSURE_MAX[unit.name]) in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("unit", SYSTEM_UNITS, ids=lambda unit: unit.name)
def test_units_for_servers_run_commands_of_ours(unit: Path, served: list[WorkerConfig]) -> None:
    """With the arguments that they give, and time to drain."""
    values = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
    _, command, *arguments = shlex.split(values["ExecStart"].replace("%i", "one").replace("%d", "/nowhere"))
    run([command, *arguments, "--help"])
    if command == "worker":
        run([command, *arguments])
        assert [(config.supervise, config.name) for config in served] == [(False, "one")]
    assert int(values["TimeoutStopSec"]) > WorkerConfig().drain_timeout_s


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
    deployment, service, policy = yaml.safe_load_all(MANIFEST.read_text())
    pod = deployment["spec"]["template"]["spec"]
    worker, http = pod["containers"]
    run(worker["args"])
    assert [config.supervise for config in served] == [False]
    assert pod["terminationGracePeriodSeconds"] > WorkerConfig().drain_timeout_s
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        program, *arguments = worker[probe]["exec"]["command"]
        assert program == "zmqengine"
        run([*arguments, "--help"])
    # What is alive and does not move is started again.
    assert "--progress" in worker["livenessProbe"]["exec"]["command"]
    run([*http["args"], "--help"])
    assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]


@pytest.mark.process
@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
def test_kubernetes_knows_every_field_of_the_manifest(version: str) -> None:
    """By the schemas of its releases; a field that they do not know is a mistake in writing."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(MANIFEST.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_no_port_is_open_without_a_key() -> None:
    """Kubernetes starts no pod without the secret, compose no service without the variable."""
    deployment, *_ = yaml.safe_load_all(MANIFEST.read_text())
    _, http = deployment["spec"]["template"]["spec"]["containers"]
    keys = {entry["name"]: entry for entry in http["env"]}["ZMQENGINE_HTTP_API_KEYS"]
    assert "optional" not in keys["valueFrom"]["secretKeyRef"]
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert services["http"]["environment"]["ZMQENGINE_HTTP_API_KEYS"].startswith(
        "${ZMQENGINE_HTTP_API_KEYS:?"
    )
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    # Told to listen everywhere and given no key, the front-end does not start at all.
    refused = CliRunner().invoke(
        zmqengine, ["http", "--host", "0.0.0.0", "--port", "0"], standalone_mode=False
    )
    assert isinstance(refused.exception, ConfigError)


def test_composed_services_run_commands_of_ours(served: list[WorkerConfig]) -> None:
    """And get time to drain."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    run(services["worker"]["command"])
    assert [config.supervise for config in served] == [False]
    run([*services["http"]["command"], "--help"])
    for name in ("worker", "http"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > WorkerConfig().drain_timeout_s
    build = services["worker"]["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE


def compose_command() -> list[str]:
    """Docker's compose in either of its forms; empty where there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        ):
            return command
    return []


def test_docker_takes_the_compose_file() -> None:
    """`docker compose config`, with and without the key."""
    compose = compose_command()
    if not compose:
        pytest.skip("docker compose is not installed")
    command = [*compose, "--file", str(COMPOSE), "config", "--quiet"]
    environment = os.environ | {"ZMQENGINE_HTTP_API_KEYS": "a-key-of-some-length"}
    checked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    environment.pop("ZMQENGINE_HTTP_API_KEYS")
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(not shutil.which("ruby"), reason="ruby is not installed")
def test_the_formula_is_ruby() -> None:
    """`ruby -c`; what Homebrew says of it can only be asked on a Mac."""
    checked = subprocess.run(["ruby", "-c", str(FORMULA)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "Syntax OK\n"), checked.stderr


def test_the_formula_installs_extras_and_starts_a_command_that_exist(served: list[WorkerConfig]) -> None:
    """As brew would."""
    text = FORMULA.read_text()
    extras = set(re.findall(r"buildpath\}\[([\w,]+)\]", text)[0].split(","))
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert extras <= known
    (words,) = re.findall(r'run \[opt_bin/"zmqengine", (.+)\]', text)
    run([word.strip().strip('"') for word in words.split(",")])
    # launchd starts again what crashed only, and the supervisor what may succeed.
    assert [config.supervise for config in served] == [True]
    assert "keep_alive crashed: true" in text
    run(["doctor", "--help"])


def test_the_formulas_test_needs_no_gpu_and_its_hash_is_no_invention(served: list[WorkerConfig]) -> None:
    """brew's sandbox has none: the worker's engine is a fake, and `doctor`, which asks MLX, is not called."""
    text = FORMULA.read_text()
    block = text[text.index("  test do") :]
    assert '"doctor"' not in block
    (words,) = re.findall(r'spawn bin/"zmqengine", (.+)', block)
    run([word.strip().strip('"') for word in words.split(",")])
    assert [(config.engine, config.supervise) for config in served] == [("fake:{}", False)]
    for words in re.findall(r'system bin/"zmqengine", (.+)', block):
        run([*(word.strip().strip('"') for word in words.split(",")), "--help"])
    for digest in re.findall(r'sha256 "(\w+)"', text):
        assert len(set(digest)) > 8, "a hash that nobody has computed"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=[file.stem for file in WORKFLOWS])
def test_what_a_workflow_names_is_there_and_its_jobs_end(file: Path) -> None:
    """A test or a script that was moved is missed once a week, or at a release."""
    workflow = yaml.safe_load(file.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    named = re.findall(r"(?<![\w/])(?:\.ci|tests)/[\w./]+", "\n".join(step.get("run", "") for step in steps))
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_only_a_tag_whose_wheels_install_is_published_and_no_token_is_stored() -> None:
    """PyPI trusts the workflow by its name; what runs before has no right to publish."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    publish = jobs.pop("publish")
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert set(publish["needs"]) == set(jobs) - {"build"}
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in jobs.values())
    assert "secrets." not in str(jobs) + str(publish)


def test_ci_makes_the_report_of_macs_on_each_macos_and_keeps_it() -> None:
    """The runners have a paravirtual GPU: what it computes counts. A crash leaves the file, which is kept."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["metal"]
    assert {"macos-26", "macos-27"} <= set(job["strategy"]["matrix"]["os"])
    (report,) = [step["run"] for step in job["steps"] if "--metal-report" in step.get("run", "")]
    (upload,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert report.split()[-1] == upload["with"]["path"]
    assert (upload["if"], "matrix.os" in upload["with"]["name"]) == ("always()", True)
    run(["doctor", "--help"])
