"""The page about embeddings says what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.workers import WorkerProcess
from zmqengine.checkpoint.recipe import FAMILIES
from zmqengine.worker.main import TEXTS_MAX

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embeddings.md"


def test_the_search_runs_without_a_network_and_finds_what_is_meant() -> None:
    """As it stands on the page, with the bundled model."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    with WorkerProcess(None, model="pico-embed", supervise=False) as worker:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "ZMQENGINE_ADDRESS": worker.address, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    assert "kite" in lines[0]
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] - scores[1] > 0.1


def test_the_page_names_every_family_and_the_limit() -> None:
    """A family that is added is told of."""
    text = PAGE.read_text(encoding="utf-8").lower().replace("-", "")
    assert all(family.replace("-", "") in text for family in FAMILIES)
    assert f"messages of up to {TEXTS_MAX}" in text
