"""`zmqengine adapters`: adapters of a worker that serves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RunningWorker
from tests.support.adapters import write_opaque_adapter


def test_adapters_come_and_go(
    start_worker: Callable[..., RunningWorker],
    run: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listed, used by a generation, shown by `status`; an unknown name is refused with those that are there."""
    worker = start_worker()
    at = ["-w", worker.name]
    write_opaque_adapter(tmp_path / "odd")
    monkeypatch.chdir(tmp_path)
    assert "zmqengine adapters load NAME DIR" in run("adapters", "list", *at).stderr
    missing = run("adapters", "load", "odd", "elsewhere", *at)
    assert missing.returncode == 1
    assert "the adapter odd cannot be read" in missing.stderr
    # A directory from here is one of the worker's machine by its whole path.
    loaded = run("adapters", "load", "odd", "odd", *at)
    assert loaded.returncode == 0, loaded.stderr
    assert "fake:odd" in loaded.stderr
    assert json.loads(run("adapters", "list", "--json", *at).stdout) == ["odd"]
    outputs = [run("generate", "a", "-n", "8", *more, *at).stdout for more in ([], ["--adapter", "odd"])]
    assert outputs[0] != outputs[1]
    assert "adapters    odd" in run("status", *at).stdout
    assert run("adapters", "unload", "odd", *at).returncode == 0
    again = run("adapters", "unload", "odd", *at)
    assert again.returncode == 1
    assert "there is no adapter 'odd': the model has none" in again.stderr
    refused = run("generate", "a", "--adapter", "odd", *at)
    assert refused.returncode != 0
    assert "the model has no 'odd'" in refused.stderr
