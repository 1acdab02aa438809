"""`clients/pyproject.toml`: the client as a distribution of its own has what it imports, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import module_graph

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[2]
CLIENT = tomllib.loads((ROOT / "clients/pyproject.toml").read_text())
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_it_has_every_module_that_the_client_imports() -> None:
    """And none that nothing of the client needs: a folder of the list is needed for one of its files."""
    files, needed = module_graph.files(), set[str]()
    waiting = [name for name in files if name.split(".")[0] == "zmqengine_client"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += files[name]
    paths = {
        module_graph.modules()[name].relative_to(ROOT).as_posix()
        for name in needed
        if name.split(".")[0] == "zmqengine"
    }
    included = CLIENT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all(source.removeprefix("../") == target for source, target in included.items())
    listed = set(included.values())
    assert [path for path in paths if path not in listed and path.rpartition("/")[0] not in listed] == []
    unneeded = {
        each for each in listed if each.endswith(".py") or (ROOT / each).is_dir()
        if not any(path == each or path.startswith(f"{each}/") for path in paths)
    }  # fmt: skip
    assert unneeded == {"zmqengine/__init__.py"}


def test_it_asks_for_what_the_whole_one_asks_for() -> None:
    """Dependencies agree, but for those of the command line; so do licence, author and versions of Python."""
    project = CLIENT["project"]
    assert set(WHOLE["dependencies"]) - set(project["dependencies"]) == {"click>=8.1"}
    assert set(project["dependencies"]) <= set(WHOLE["dependencies"])
    assert project["optional-dependencies"]["vision"] == WHOLE["optional-dependencies"]["vision"]
    for key in ("license", "authors", "requires-python"):
        assert project[key] == WHOLE[key]
    version = (ROOT / "zmqengine/__init__.py").read_text()
    assert f'__version__ = "{WHOLE["version"]}"' in version
