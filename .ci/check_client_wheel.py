"""Says what the wheel of the client alone lacks: every module in it is imported, and none from elsewhere."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path


def main(wheel: str) -> int:
    """Import from the wheel; returns the exit code."""
    # Its own modules come before those of an installed `zmqengine`.
    sys.path.insert(0, str(Path(wheel).resolve()))
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if name.endswith(".py")]
    names = [".".join(Path(name).with_suffix("").parts).removesuffix(".__init__") for name in files]
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    ours = {
        name: module for name, module in sys.modules.items() if name.split(".")[0].startswith("zmqengine")
    }
    problems += [
        f"not in the wheel: {name}" for name, module in ours.items() if wheel not in str(module.__file__)
    ]
    print("\n".join(sorted(problems)) or f"{len(names)} modules, nothing missing", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
