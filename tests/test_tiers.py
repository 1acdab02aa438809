"""The default tier needs what README's command for the tests installs, and no other program."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tomllib  # type: ignore[import-not-found, unused-ignore]
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for place in ("tests", "benchmarks", "tools")
    for path in sorted((ROOT / place).rglob("*.py"))
}
TIERS = re.compile(r"mark\.(process|slow|weekly)\b")
IMPORT = re.compile(r"^( *)(?:(?:import|from) ([\w.]+)|.*importorskip\(\"(\w+))", re.MULTILINE)


def distributions(extra: str) -> set[str]:
    """What an extra of ours installs, with all that this requires in turn."""
    todo, known = [("zmqengine", ""), ("zmqengine", extra)], set()
    while todo:
        distribution, with_extra = todo.pop()
        lines = requirements(distribution, with_extra)
        for each in map(Requirement, lines):
            if each.marker is None or each.marker.evaluate({"extra": with_extra}):
                for pair in ((each.name, ""), *((each.name, one) for one in each.extras)):
                    if pair not in known:
                        known.add(pair)
                        todo.append(pair)
    return {re.sub(r"[-_.]+", "-", name).lower() for name, _ in known}


def requirements(distribution: str, extra: str) -> Sequence[str]:
    """Those of a distribution: of ours as they are now, of others as they were installed."""
    if distribution == "zmqengine":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        return project["optional-dependencies"][extra] if extra else project["dependencies"]
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def modules_of_programs() -> set[str]:
    """The modules that the extra `programs` brings and the extra `test` does not."""
    others = distributions("programs") - distributions("test")
    return {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if {re.sub(r"[-_.]+", "-", name).lower() for name in names} <= others
    }


def needs_of(path: Path, programs: set[str]) -> Iterator[tuple[int, str]]:
    """The lines that import a program, and its name; within a function as a negative number."""
    text = path.read_text("utf-8")
    for found in IMPORT.finditer(text):
        name = (found[2] or found[3]).partition(".")[0]
        if name in programs:
            line = text.count("\n", 0, found.start()) + 1
            yield (-line if found[1] else line), name


def users_of(path: Path, line: int) -> Iterator[ast.FunctionDef]:
    """The tests of a file whose function has this line, or that name the function that has it."""
    functions = [
        each for each in ast.parse(path.read_text("utf-8")).body if isinstance(each, ast.FunctionDef)
    ]
    around = next((each for each in functions if each.lineno <= line <= (each.end_lineno or 0)), None)
    for each in functions:
        names = {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
        if each.name.startswith("test_") and (each is around or (around and around.name in names)):
            yield each


def untiered(programs: set[str]) -> set[str]:
    """Test files, and tests in other files, of the default tier that need one of these modules."""
    needs = {name: list(needs_of(path, programs)) for name, path in FILES.items()}
    # A helper that imports one somewhere is as if it did at its top.
    whole = {
        name
        for name, lines in needs.items()
        if any(line > 0 for line, _ in lines) or (lines and not FILES[name].stem.startswith("test_"))
    }
    imports = {
        name: {found[2] for found in IMPORT.finditer(path.read_text("utf-8")) if not found[1]} & FILES.keys()
        for name, path in FILES.items()
    }
    while more := {name for name, others in imports.items() if others & whole} - whole:
        whole |= more
    found = set()
    for name in FILES:
        text = FILES[name].read_text("utf-8")
        if not FILES[name].stem.startswith("test_") or re.search(
            rf"^pytestmark = .*{TIERS.pattern}", text, re.M
        ):
            continue
        if name in whole:
            found.add(name)
        for line, _ in needs[name]:
            for test in users_of(FILES[name], abs(line)):
                if not TIERS.search(" ".join(map(ast.unparse, test.decorator_list))):
                    found.add(f"{name}.{test.name}")
    return found


def test_no_test_of_the_default_tier_needs_a_program_of_others() -> None:
    """CI installs the extra `programs` as well, and would not see what fails for who has only the extra `test`."""
    programs = modules_of_programs()
    if "openai" not in programs:
        pytest.skip("the extra `programs` is not installed: a test that needs one fails by itself")
    assert programs >= {"anthropic", "ollama", "schemathesis", "selenium"}
    assert not programs & {"hypothesis", "msgpack", "numpy", "pytest", "yaml"}
    assert untiered(programs) == set()


def test_a_file_that_needs_one_by_way_of_another_is_found() -> None:
    """Of a module that helpers of the default tier import, their users are told."""
    assert "tests.http.test_linear" in untiered({"random"})
