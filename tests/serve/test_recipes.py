"""docs/recipes.md: each task runs as it stands there, against `zmqengine serve` with the bundled models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.serve.launching import LauncherProcess, toml
from tests.support.ports import free_port
from tests.support.workers import START_S, wait_until

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text()
TASKS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


class Site(NamedTuple):
    """A launcher with HTTP in front, and the ports that stand for those of the page."""

    launched: LauncherProcess
    port: int

    def run(self, language: str, program: str, directory: Path) -> str:
        """What a block of the page writes."""
        program = program.replace("localhost:8000", f"localhost:{self.port}")
        program = program.replace(":5555", f":{free_port()}")
        command = ["bash", "-eu", "-c"] if language == "sh" else [sys.executable, "-c"]
        environment = self.launched.environment | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PICTURES": str(ROOT / "docs/pictures"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_STATE_HOME": str(directory / "state"),
        }
        ran = subprocess.run(
            [*command, program], cwd=directory, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=2 * START_S, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    models = {name: {"path": name} for name in ("pico", "pico-eye", "pico-embed")}
    port = free_port()
    with LauncherProcess(toml(models), "--port", str(port), http=True) as launched:
        wait_until(lambda: launched.command("status").returncode == 0, launched.log)
        yield Site(launched, port)


@pytest.mark.parametrize("task", TASKS, ids=[task.split(".")[0] for task in TASKS])
def test_a_recipe_does_what_it_promises(site: Site, task: str, tmp_path: Path) -> None:
    """Its blocks in their order, in one directory."""
    blocks = re.findall(r"```(sh|python)\n(.*?)```", task, re.DOTALL)
    assert blocks
    shown = [site.run(language, program, tmp_path) for language, program in blocks]
    assert all(text.strip() for text in shown), shown
    if task.startswith("1."):
        assert "a.txt.summary" in shown[1]
        assert all(path.read_text().strip() for path in tmp_path.glob("notes/*.summary"))
    if task.startswith("3."):
        assert shown[0].count('"mood"') == 2
    if task.startswith("4."):
        assert shown[0].strip() == "20"
        assert site.run(blocks[0][0], blocks[0][1], tmp_path).strip() == "20", (
            "a second run does what is left: nothing"
        )
    if task.startswith("7."):
        assert "red circle" in shown[0]
    if task.startswith("8."):
        assert shown[0].strip() in ("pass", "fail")
    if task.startswith("9."):
        assert "Tell me about a lighthouse." in shown[0]
    if task.startswith("10."):
        assert "pico" in shown[0]


def test_there_are_ten() -> None:
    """Numbered, so that none is left out of the runs."""
    assert [int(task.split(".")[0]) for task in TASKS] == list(range(1, 11))
