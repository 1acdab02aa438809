"""What README.md promises."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from zmqengine.cli.main import zmqengine
from zmqengine_client import Client

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("**/*.md")),
    "benchmarks/README.md",
    "deploy/README.md",
    "deploy/smg/README.md",
    "clients/zmqengine_smg/README.md",
)


@pytest.fixture
def default_worker() -> Iterator[dict[str, str]]:
    """A worker on pico under the default name; the environment in which programs find it."""
    with tempfile.TemporaryDirectory(prefix="zmqe-", dir="/tmp") as directory:
        environment = os.environ | {"ZMQENGINE_DIR": directory, "OPENBLAS_NUM_THREADS": "1"}
        environment.pop("ZMQENGINE_ADDRESS", None)
        command = [sys.executable, "-m", "zmqengine.cli.main", "worker", "--log-level", "error"]
        worker = subprocess.Popen(command, env=environment)
        try:
            # A program waits ten seconds for a sign of life. A loaded machine may take longer to start a worker.
            with Client(f"ipc://{directory}/default/ctl", connect_timeout_s=60) as client:
                client.wait_ready()
            yield environment
        finally:
            worker.terminate()
            code = worker.wait(60)
        assert code == 0


def test_the_first_program_writes_a_text(default_worker: dict[str, str]) -> None:
    """Five lines, as they stand there, against the default worker."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 5
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=default_worker,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 10


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of our pages is a file or a directory."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_files_that_are_named_exist() -> None:
    """The table of how a request travels."""
    table = (ROOT / "docs/request.md").read_text()
    named = re.findall(r"`((?:clients|zmqengine)/[^`]*)`", table)
    assert len(named) >= 6
    for path in named:
        assert (ROOT / path).exists(), path


def test_commands_that_are_shown_exist() -> None:
    """Every call of `zmqengine` in our pages has a command and options that it takes."""
    calls = [call for page in PAGES for call in shown_calls((ROOT / page).read_text())]
    assert len(calls) > 10
    for call in calls:
        if call:
            # What stands behind -- is another program's.
            ours = call[: call.index("--")] if "--" in call else call
            result = CliRunner().invoke(zmqengine, [*ours, "--help"], standalone_mode=False)
            assert result.exception is None, (call, result.exception)


def test_every_source_file_that_a_page_names_is_there() -> None:
    """By its name, or by the end of its path. Two pages name files of other programs, or that were thrown away."""
    places = [
        path
        for top in ("benchmarks", "clients", "tests", "tools", "zmqengine")
        for path in (ROOT / top).rglob("*.py")
    ]
    files = [f"/{path.relative_to(ROOT)}" for path in places]
    for page in set(PAGES) - {"docs/how-to-add.md", "docs/http-clients.md"}:
        for name in re.findall(r"`([\w/.-]+\.py)(?:::\w+)?`", (ROOT / page).read_text()):
            assert any(file.endswith(f"/{name}") for file in files), (page, name)


def shown_calls(text: str) -> list[list[str]]:
    """The arguments of each call, in code blocks and between backticks."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    inline = "\n".join(re.findall(r"`([^`\n]+)`", text))
    calls = re.findall(r"^(?:\S*/)?zmqengine ([a-z].*)$", blocks + "\n" + inline, re.MULTILINE)
    return [shlex.split(call.split("#")[0].split("&")[0].split(" | ")[0]) for call in calls]
