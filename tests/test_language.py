"""Docstrings that make sense alone, and class names that mean one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

import pytest

from tools import module_graph

# A first line that begins so has lost its subject: it is read in a hover, without the text around it.
VAGUE = re.compile(r"(What|Who|Whoever|Where|Of|Those|The same|So many|So much)\b")


def package_of(module: str) -> str:
    """`zmqengine.worker.wire.sockets` -> `zmqengine.worker`; `zmqengine_http.app` -> `zmqengine_http`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "zmqengine" else parts[0]


@cache
def vague_first_lines() -> Counter[str]:
    """The number of docstrings that begin without a subject, by package."""
    found: Counter[str] = Counter()
    for module, path in module_graph.modules().items():
        for node in ast.walk(module_graph.tree(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[package_of(module)] += bool(VAGUE.match(ast.get_docstring(node) or ""))
    return found


@pytest.mark.parametrize("package", sorted({package_of(module) for module in module_graph.modules()}))
def test_a_docstring_begins_with_its_subject(package: str) -> None:
    """No new first line without a noun; the number of old ones only falls."""
    assert not vague_first_lines()[package]


def test_a_class_name_means_one_thing() -> None:
    """A name that is used again is searched for in vain. The client's blocking half is made from the other one."""
    homes: dict[str, set[str]] = {}
    for module, path in module_graph.modules().items():
        for node in ast.walk(module_graph.tree(path)):
            if isinstance(node, ast.ClassDef) and not module.startswith("zmqengine_client.sync"):
                homes.setdefault(node.name, set()).add(module)
    assert not {name for name, modules in homes.items() if len(modules) > 1}


# Names of files that packages share for one subject: the sides of the wire, the entry points of two programs, rules of
# the protocol beside the code that keeps them.
SHARED_FILES = {
    "__init__.py", "__main__.py", "control.py", "images.py", "keys.py", "logs.py", "main.py", "metrics.py",
    "options.py", "session.py", "sessions.py",
}  # fmt: skip


def test_a_file_name_of_engine_and_worker_means_one_thing() -> None:
    """A file is searched for by its name; one that is taken needs a longer one."""
    homes: dict[str, set[str]] = {}
    for module, path in module_graph.modules().items():
        homes.setdefault(path.name, set()).add(package_of(module))
    ours = {"zmqengine.engine", "zmqengine.worker"}
    taken = {name for name, packages in homes.items() if len(packages) > 1 and packages & ours}
    assert taken <= SHARED_FILES
