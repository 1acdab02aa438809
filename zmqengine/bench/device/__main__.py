"""`python -m zmqengine.bench.device CHECK`: one group of checks; a line of JSON for each verdict, as it is found."""

from __future__ import annotations

import sys
from importlib import import_module

import msgspec

# Before anything imports MLX: it reads its variables, and binds to a BLAS.
import zmqengine.engine.open  # noqa: F401
from zmqengine.bench.device.verdict import Verdict

CHECKS = ("operations", "architectures", "residency", "buffers", "margins", "pauses", "speed")


def main() -> int:
    """Run the named group; code 1 if it raises."""
    (name,) = sys.argv[1:]
    assert name in CHECKS
    verdict: Verdict
    for verdict in import_module(f"zmqengine.bench.device.{name}").check():
        print(msgspec.json.encode(verdict).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
