"""Every code block of README and the docs runs in CI, or is parsed where it needs somebody else's program or a network.

`PLACES` says where. A new block without a place fails here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib  # type: ignore[import-not-found, unused-ignore]
import yaml

from tests.support.ports import free_port
from tests.support.workers import START_S
from zmqengine.serve.entries import read_offer
from zmqengine_client import Client

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
)
HERE = "tests/test_code_blocks.py"


class Block(NamedTuple):
    """A block of a page."""

    page: str
    language: str
    text: str


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
]
# By the page, the language and the beginning; the first that fits counts.
PLACES = (
    ("docs/client.md", "mermaid", "", "tests/client/core/test_phases.py"),
    ("README.md", "mermaid", "", "drawing"),
    ("README.md", "sh", "python3 -m venv", ".github/workflows/ci.yml"),
    ("README.md", "sh", ".venv/bin/pip", ".github/workflows/ci.yml"),
    ("README.md", "sh", "uv tool install", ".github/workflows/ci.yml"),
    ("README.md", "sh", "zmqengine chat  ", "tests/test_first_minutes.py"),
    ("README.md", "sh", "zmqengine serve  ", "tests/test_first_minutes.py"),
    ("README.md", "sh", "echo '{", HERE),
    ("README.md", "sh", "zmqengine worker --model pico-eye", HERE),
    ("README.md", "sh", "zmqengine keygen", HERE),
    ("README.md", "sh", "zmqengine worker --model mlx-community", "tests/test_readme.py"),
    ("README.md", "python", "", "tests/test_readme.py"),
    ("CONTRIBUTING.md", "sh", "", ".github/workflows/ci.yml"),
    ("docs/agents.md", "sh", "unshare", "tests/test_readme.py"),
    ("docs/constraints.md", "python", "", HERE),
    ("docs/embeddings.md", "python", "", "tests/embedding/test_docs.py"),
    ("docs/first-minutes.md", "console", "", "tests/test_first_minutes.py"),
    ("docs/python.md", "python", "", "tests/client/test_manual.py"),
    ("docs/recipes.md", "", "", "tests/serve/test_recipes.py"),
    ("docs/serve.md", "toml", "", HERE),
    ("docs/serve.md", "sh", "zmqengine models", "tests/test_first_minutes.py"),
    ("docs/serve.md", "sh", "zmqengine serve  ", "tests/test_readme.py"),
    ("docs/agents/", "json", "", HERE),
    ("docs/agents/", "yaml", "", HERE),
    ("docs/agents/", "sh", "", "tests/test_readme.py"),
)


def place_of(block: Block) -> str | None:
    """Where a block runs."""
    for page, language, beginning, place in PLACES:
        if (
            block.page.startswith(page)
            and language in ("", block.language)
            and block.text.startswith(beginning)
        ):
            return place
    return None


@pytest.mark.parametrize("block", BLOCKS, ids=[f"{block.page}:{block.text[:24]!r}" for block in BLOCKS])
def test_every_block_has_a_place(block: Block) -> None:
    place = place_of(block)
    assert place is not None, f"a block of {block.page} runs nowhere:\n{block.text}"
    assert place == "drawing" or (ROOT / place).exists()


def test_every_place_has_a_block() -> None:
    """A rule for a block that is gone would hide the next one that looks like it."""
    used = {
        next(rule for rule in PLACES if block.page.startswith(rule[0]) and rule[1] in ("", block.language)
             and block.text.startswith(rule[2]))
        for block in BLOCKS
    }  # fmt: skip
    assert set(PLACES) == used


def test_what_programs_of_others_read_can_be_read() -> None:
    """The settings of editors and user interfaces are JSON and YAML; the list of models is one."""
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)


def test_the_list_of_models_is_read_as_it_stands_there(tmp_path: Path) -> None:
    """Its models are not on this machine, which is all that is wrong with them."""
    (listed,) = [block.text for block in BLOCKS if block.language == "toml"]
    file = tmp_path / "models.toml"
    file.write_text(listed)
    offer = read_offer([str(file)], tmp_path, {})
    assert list(offer.entries) == [model["name"] for model in tomllib.loads(listed)["model"]]
    assert "zmqengine pull mlx-community/Qwen3-4B-4bit" in offer.find("gpt-4o").never


class Shell:
    """A directory in which blocks of README are typed; what goes on stays in the background until the end."""

    def __init__(self, sockets: str, directory: Path) -> None:
        self.directory = directory
        self.environment = os.environ | {
            "ZMQENGINE_DIR": sockets, "XDG_STATE_HOME": str(directory), "OPENBLAS_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1",
        }  # fmt: skip
        self.background: list[subprocess.Popen[bytes]] = []

    def type(self, text: str) -> str:
        """Run the lines of a block; returns what they write."""
        shown = ""
        for line in re.sub(r"\n  ", " ", text).splitlines():
            if line.startswith("zmqengine worker"):
                self.background.append(
                    subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=self.directory, env=self.environment)
                )
                continue
            ran = subprocess.run(
                ["bash", "-c", line], cwd=self.directory, env=self.environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=2 * START_S, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, f"{line}\n{ran.stderr}"
            shown += ran.stdout
        return shown

    def end(self) -> None:
        for process in self.background:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(START_S) for process in self.background] == [0] * len(self.background)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with tempfile.TemporaryDirectory(prefix="zb-", dir="/tmp") as sockets:
        shell = Shell(sockets, tmp_path)
        (tmp_path / "docs").symlink_to(ROOT / "docs")
        yield shell
        shell.end()


def block_of(page: str, beginning: str) -> str:
    """The block of a page that begins so."""
    (text,) = [block.text for block in BLOCKS if block.page == page and block.text.startswith(beginning)]
    return text


def wait_for_worker(shell: Shell) -> None:
    """The page has a person between the commands, who sees that the worker is there."""
    with Client(
        f"ipc://{shell.environment['ZMQENGINE_DIR']}/default/ctl", connect_timeout_s=START_S
    ) as client:
        client.wait_ready(START_S)


@pytest.mark.process
def test_the_output_fits_the_schema_on_the_command_line_and_in_python(shell: Shell) -> None:
    """The default worker's; `person.json` is written by the block itself."""
    shell.type("zmqengine worker --log-level error")
    wait_for_worker(shell)
    person = json.loads(shell.type(block_of("README.md", "echo '{")))
    assert set(person) == {"name", "mood"}
    program = block_of("docs/constraints.md", "from dataclasses")
    ran = subprocess.run(
        [sys.executable, "-c", program + "\nprint(person.mood in ('glad', 'sad'))"],
        env=shell.environment, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


@pytest.mark.process
def test_a_picture_is_described(shell: Shell) -> None:
    """As the comment behind the command says."""
    worker, question = block_of("README.md", "zmqengine worker --model pico-eye").splitlines()
    shell.type(worker)
    wait_for_worker(shell)
    assert shell.type(question).strip() == question.partition("#")[2].strip()


@pytest.mark.process
def test_another_machine_needs_the_keys(shell: Shell) -> None:
    """This one stands for it."""
    block = (
        block_of("README.md", "zmqengine keygen").replace("0.0.0.0", "127.0.0.1").replace("HOST", "127.0.0.1")
    )
    block = block.replace(":5555", f":{free_port()}")
    keys, worker, question = block.splitlines()
    shell.type(keys)
    shell.type(worker)
    # Its port is a socket without a file, so the command waits for it.
    shell.environment |= {"PYTHONUNBUFFERED": "1"}
    assert shell.type(f'{question} -n 20 "Tell me a story."').strip()
