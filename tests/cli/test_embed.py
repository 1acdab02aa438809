"""`zmqengine embed`, against a real worker process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import RunningWorker
from zmqengine.cli.commands import embed as command

Run = Callable[..., subprocess.CompletedProcess[str]]
StartWorker = Callable[..., RunningWorker]


def test_lines_of_every_form_become_lines_with_an_embedding(
    start_worker: StartWorker, run: Run, tmp_path: Path
) -> None:
    """Objects keep their other fields; empty lines are passed over."""
    worker = start_worker(dimensions=6)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"id": 7, "text": "abc"}\n\n"abc"\nabc\n{not json\n')
    ran = run("embed", "-w", worker.name, str(file))
    assert ran.returncode == 0, ran.stderr
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each["text"] for each in made] == ["abc", "abc", "abc", "{not json"]
    assert made[0]["id"] == 7
    assert made[0]["embedding"] == made[1]["embedding"] == made[2]["embedding"] != made[3]["embedding"]
    assert len(made[0]["embedding"]) == 6


def test_an_array_is_written_in_the_order_of_the_lines(
    start_worker: StartWorker, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More lines than are held at once, from another field, cut to fewer floats."""
    monkeypatch.setattr(command, "BLOCK_TEXTS", 16)
    worker = start_worker(dimensions=6)
    file, out = tmp_path / "texts.jsonl", tmp_path / "vectors.npy"
    file.write_text("".join(json.dumps({"body": f"text {number % 10}"}) + "\n" for number in range(50)))
    ran = run("embed", "-w", worker.name, "--field", "body", "--dimensions", "4", "-o", str(out), str(file))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    assert "50 vectors" in ran.stderr
    made = np.load(out)
    assert made.shape == (50, 4)
    np.testing.assert_array_equal(made[:10], made[40:])
    assert not np.array_equal(made[0], made[1])


def test_what_cannot_work_is_one_line(
    start_worker: StartWorker, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the place, and what to do."""
    monkeypatch.setattr(command, "BLOCK_TEXTS", 2)
    worker = start_worker(dimensions=6, context_tokens=40)
    file = tmp_path / "texts.jsonl"
    file.write_text('"fine"\n{"body": "abc"}\n')
    refused = run("embed", "-w", worker.name, str(file))
    assert refused.returncode == 2
    assert "line 2: the object has no text in 'text'" in refused.stderr
    file.write_text("a\n\nb\nc\n" + "a" * 50)
    too_long = run("embed", "-w", worker.name, str(file))
    assert too_long.returncode == 1
    assert "line 5: the text has 50 tokens, over the 40" in too_long.stderr
    assert "with --truncate" in too_long.stderr
    assert run("embed", "-w", worker.name, "--truncate", str(file)).returncode == 0
    nowhere = run("embed", "-w", "absent", "-o", str(tmp_path / "absent" / "x.npy"), str(file))
    assert nowhere.stderr == f"zmqengine: {tmp_path}/absent/x.npy: No such file or directory\n", (
        "before any work"
    )
