"""The folders say what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import zmqengine.engine
import zmqengine.engine.kv


@pytest.mark.parametrize("package", [zmqengine.engine, zmqengine.engine.kv])
def test_every_file_has_its_line_on_the_map(package):
    """And no line is about a file that is gone."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    there = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    lines = [line.split("  ")[0].strip() for line in (package.__doc__ or "").splitlines()[1:] if line.strip()]
    named = [name.strip() for line in lines for name in line.split(",")]
    assert sorted(named) == sorted(there)
