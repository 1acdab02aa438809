"""`python -m zmqengine.bench.device CHECK DIRECTORY`: one group of checks, with models in DIRECTORY; a line of JSON for
each verdict, as it is found."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import msgspec

# Before anything imports MLX: it reads its variables, and binds to a BLAS.
import zmqengine.engine.open  # noqa: F401
from zmqengine.bench.device.verdict import Verdict

CHECKS = (
    "operations", "chats", "steps", "kernels", "buffers", "residency", "pauses", "margins", "architectures"
)  # fmt: skip


def main() -> int:
    """Run the named group; code 1 if it raises."""
    name, directory = sys.argv[1:]
    assert name in CHECKS
    verdict: Verdict
    for verdict in import_module(f"zmqengine.bench.device.{name}").check(Path(directory)):
        print(msgspec.json.encode(verdict).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
