"""Real workers on the fake engine for the command line to talk to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def short_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A directory for sockets whose paths the system allows; workers and clients of this test use it."""
    directory = tempfile.mkdtemp(prefix="zmqe-", dir="/tmp")
    monkeypatch.setenv("ZMQENGINE_DIR", directory)
    monkeypatch.delenv("ZMQENGINE_ADDRESS", raising=False)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
