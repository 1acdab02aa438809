"""The library's types are known to pyright, which many editors run, in its strict mode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.programs.programs_of_others import NODE_DIRECTORY, node_wanted

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
TYPED = """
from dataclasses import dataclass
from zmqengine_client import Client

@dataclass
class Person:
    name: str

with Client() as client:
    person: Person = client.generate("Once", schema=Person).read_object(Person)
    wrong: int = client.generate("Once", schema=Person).read_object(Person)
"""


@node_wanted
@pytest.mark.slow
def test_the_programs_of_the_manual_have_no_unknown_type(tmp_path: Path) -> None:
    """A wrong assignment is an error: results are not `Any`, which agrees with everything."""
    for number, program in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(program)
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT), str(ROOT / "clients")]})
    )
    ran = subprocess.run(
        [f"{NODE_DIRECTORY}/node_modules/.bin/pyright", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path, capture_output=True, text=True, timeout=220, check=False, env=os.environ,
    )  # fmt: skip
    found = [
        (Path(each["file"]).name, each["message"]) for each in json.loads(ran.stdout)["generalDiagnostics"]
    ]
    assert [name for name, _ in found] == ["typed.py"], found
    assert '"Person" is not assignable to "int"' in found[0][1]
