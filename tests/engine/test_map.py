"""The folders say what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import zmqengine.engine
import zmqengine.engine.kv
import zmqengine.engine.prompt_store
import zmqengine.engine.prompt_store.disk


@pytest.mark.parametrize(
    "package",
    [
        zmqengine.engine,
        zmqengine.engine.kv,
        zmqengine.engine.prompt_store,
        zmqengine.engine.prompt_store.disk,
    ],
)
def test_every_file_has_its_line_on_the_map(package):
    """And no line is about a file that is gone."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    lines = [line.split("  ")[0].strip() for line in (package.__doc__ or "").splitlines()[1:] if line.strip()]
    named = [name.strip() for line in lines for name in line.split(",")]
    named = [name for name in named if name.endswith((".py", "/")) and " " not in name]
    assert sorted(named) == sorted(there)
