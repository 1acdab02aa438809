"""Says what a built wheel lacks: every file of the packages has to be in it, and nothing else beside its metadata."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Without these the wheel would install and then not work; they must exist in the checkout too.
REQUIRED = {
    "zmqengine/py.typed",
    "zmqengine/protocol/SPEC.md",
    "zmqengine/pico/model/config.json",
    "zmqengine/pico/model/model.safetensors",
    "zmqengine/pico/model/tokenizer.json",
    "zmqengine/pico/tools_model/config.json",
    "zmqengine/pico/tools_model/model.safetensors",
    "zmqengine/pico/tools_model/tokenizer.json",
    "zmqengine/cli/main.py",
    "zmqengine_client/py.typed",
    "zmqengine_client/__init__.py",
    "zmqengine_http/py.typed",
    "zmqengine_http/__init__.py",
    "zmqengine_http/page/chat/chat.html",
    "zmqengine_http/page/vendor/LICENSES.txt",
    "zmqengine_http/page/workers/workers.html",
    "zmqengine_metrics/py.typed",
    "zmqengine_metrics/__init__.py",
    "zmqengine_smg/py.typed",
    "zmqengine_smg/__init__.py",
}


def packaged() -> set[str]:
    """Every file of the checkout that belongs in the wheel, by its path there."""
    found = set()
    for parent, tops in ((ROOT, ["zmqengine"]), (ROOT / "clients", _clients())):
        for top in tops:
            for path in (parent / top).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store":
                    found.add(path.relative_to(parent).as_posix())
    return found


def _clients() -> list[str]:
    return [path.name for path in (ROOT / "clients").iterdir() if (path / "__init__.py").exists()]


def main(wheel: str) -> int:
    """Compare; returns the exit code."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name for name in archive.namelist() if not re.match(r"zmqengine-[^/]+\.dist-info/", name)}
        metadata = "\n".join(name for name in archive.namelist() if ".dist-info/" in name)
        entry_points = archive.read(re.search(r".*/entry_points\.txt", metadata)[0]).decode()  # type: ignore[index]
    problems = [f"missing: {name}" for name in sorted((packaged() | REQUIRED) - contents)]
    problems += [f"not ours: {name}" for name in sorted(contents - packaged())]
    if "zmqengine = zmqengine.cli.main:main" not in entry_points:
        problems.append("the command `zmqengine` is missing")
    if not re.search(r"licenses?/LICENSE", metadata):
        problems.append("the licence is missing")
    print("\n".join(problems) or f"{len(contents)} files, nothing missing", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
