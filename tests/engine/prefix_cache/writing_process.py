"""Writes blocks to a directory until it is killed: `python writing_process.py DIRECTORY BYTES_MAX FIRST_SEED`.

Runs begin where an earlier one ended or anew. Before each, its seed goes to standard output.
"""

from __future__ import annotations

import contextlib
import sys
from itertools import count
from pathlib import Path

from tests.engine.prefix_cache.host_blocks import SALT, chain
from zmqengine.engine.prefix_cache.disk.directory import Directory, DiskBounds, Refused

BLOCKS = 4
BLOCK_BYTES = 30_000


def main() -> None:
    path, bytes_max, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    directory = Directory(path, SALT, DiskBounds(bytes_max, 0, 1 << 60))
    directory.tidy()
    for seed in count(first):
        blocks = chain(seed, BLOCKS, size=BLOCK_BYTES)
        print(seed, flush=True)
        with contextlib.suppress(Refused):
            directory.write(blocks[:2])
            directory.write(blocks[2:])
        directory.read([block.key for block in blocks])


if __name__ == "__main__":
    main()
