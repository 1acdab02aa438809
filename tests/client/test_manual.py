"""docs/python.md: each of its programs runs, against `zmqengine serve` with the bundled models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.launching import LauncherProcess, toml
from tests.support.workers import START_S
from zmqengine_client import Client, Options
from zmqengine_client.core.options import MAX_TOKENS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def launched() -> Iterator[LauncherProcess]:
    models = {name: {"path": name} for name in ("pico", "pico-eye", "pico-embed", "pico-tools")}
    with LauncherProcess(toml(models)) as launched:
        with Client(launched.address, model="pico", connect_timeout_s=START_S) as client:
            client.wait_ready(START_S)
        yield launched


@pytest.mark.parametrize("program", PROGRAMS, ids=[str(number) for number in range(len(PROGRAMS))])
def test_a_program_of_the_manual_runs(launched: LauncherProcess, program: str) -> None:
    """As it stands there, with an output and no word of complaint."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=launched.environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert ran.stderr == ""


def test_the_manual_has_every_option_and_its_default() -> None:
    """Named in its table, or left to SPEC.md by the sampling parameters that stand there."""
    sampling = {"frequency_penalty", "presence_penalty", "repetition_context", "min_tokens"}
    for name in Options.__annotations__.keys() - {"constraint", "request_id"} - sampling:
        assert f"`{name}`" in PAGE, name
    assert f"| `max_tokens` | {MAX_TOKENS} if left out" in PAGE
