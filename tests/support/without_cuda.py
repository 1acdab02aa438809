"""Hides `zmqengine.engine.cuda` from import, and its own tests: `pytest -p tests.support.without_cuda tests/engine`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

HIDDEN = "zmqengine.engine.cuda"


class _Hidden:
    """Finds nothing, loudly."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == HIDDEN or name.startswith(f"{HIDDEN}."):
            raise ImportError(f"{name} is hidden")
        return None


def hide() -> None:
    """Hide it from every later import of this process."""
    assert not [name for name in sys.modules if name.startswith(HIDDEN)]
    sys.meta_path.insert(0, _Hidden())


def pytest_configure() -> None:
    hide()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.parts[-3:] == ("tests", "engine", "cuda") else None
