"""Another implementation in a process of its own, which answers a line of JSON with the seconds that its work took."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
ENVIRONMENT = dict(os.environ)
"""The environment of other processes, as the user set it: to be imported before `zmqengine.engine.open`, which sets
variables of MLX that suit a worker's decoder. A worker that inherits them takes them for the user's."""


class OtherProcess:
    """`command` in the root of the repository, once it has said `ready`. Raises `ClickException` if it ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**ENVIRONMENT, **(environment or {})},
        )
        while self._line() != "ready":
            pass

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def seconds(self, work: object) -> float:
        """Seconds that `work`, a value of JSON, took there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException("the other process has ended: its error is above")
        return line.strip()
