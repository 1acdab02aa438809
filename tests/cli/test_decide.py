"""`zmqengine decide`, against a real worker process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import RunningWorker

Run = Callable[..., subprocess.CompletedProcess[str]]
StartWorker = Callable[..., RunningWorker]


def test_a_question_has_the_probabilities_of_its_answers(
    start_worker: StartWorker, run: Run, tmp_path: Path
) -> None:
    """Yes and no, choices, levels, and questions in a file."""
    worker = start_worker()
    for arguments, answers in (
        (["Is it?"], ["yes", "no"]),
        (["Which?", "--choice", "red", "--choice", "dark blue"], ["red", "dark blue"]),
        (["How far?", "--level", "near", "--level", "far"], ["0", "1"]),
    ):
        ran = run("decide", "-w", worker.name, *arguments, stdin="It is.")
        assert ran.returncode == 0, ran.stderr
        rows = [line.rsplit(maxsplit=1) for line in ran.stdout.splitlines()]
        assert [answer for answer, _ in rows] == [*answers, "(coverage)"]
        assert abs(sum(float(number) for _, number in rows[:-1]) - 1) < 0.002
        ran = run("decide", "-w", worker.name, "--json", *arguments, stdin="It is.")
        assert list(json.loads(ran.stdout)["probabilities"]) == answers
    file = tmp_path / "questions.json"
    file.write_text(json.dumps({"a": {"type": "yes_no", "instructions": "Is it?"}}))
    ran = run("decide", "-w", worker.name, "--questions", str(file), stdin="It is.")
    assert ran.stdout.splitlines()[0].split()[:2] == ["a", "yes"]


def test_what_cannot_be_asked_is_one_line(start_worker: StartWorker, run: Run, tmp_path: Path) -> None:
    """Before a worker is looked for."""
    file = tmp_path / "questions.json"
    file.write_text("[]")
    for arguments, words in (
        ([], "give either QUESTION or --questions"),
        (["Is it?", "--choice", "a", "--level", "b"], "give either --choice or --level"),
        (["--questions", str(file)], "not questions by their names"),
    ):
        ran = run("decide", *arguments, stdin="It is.")
        assert ran.returncode == 2
        assert words in ran.stderr
        assert ran.stderr.count("\n") == 1
