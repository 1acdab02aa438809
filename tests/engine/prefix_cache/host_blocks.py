"""Random blocks in host memory, for tests of files and of the tier on disk."""

from __future__ import annotations

import hashlib
import random

import numpy as np

from zmqengine.engine.prefix_cache.disk.block_file import HostArray, HostBlock
from zmqengine.engine.prefix_cache.disk.directory import DiskBounds

ROOT = bytes(16)
SALT = bytes(range(16))
ROOMY = DiskBounds(bytes_max=1 << 30, free_bytes_min=0, written_bytes_max=1 << 30)
"""DiskBounds that no test reaches."""


def chain(seed: int, count: int, *, parent: bytes = ROOT, size: int = 64) -> list[HostBlock]:
    """A chain of blocks, keys included, decided by `seed`; each has two arrays of `size` bytes."""
    blocks = []
    for number in range(count):
        numbers = random.Random(f"{seed} {number} {parent.hex()}")
        tokens = np.array([numbers.randrange(1 << 20) for _ in range(16)], np.uint32)
        key = hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()
        arrays = (
            HostArray("bfloat16", (1, 2, size // 4), numbers.randbytes(size)),
            HostArray("float32", (size // 4,), numbers.randbytes(size)),
        )
        blocks.append(HostBlock(key, parent, 16 * number, tokens, arrays[:1], f"form {number}", arrays[1:]))
        parent = key
    return blocks


def plain(blocks: list[HostBlock]) -> list[tuple[object, ...]]:
    """Contents of blocks, to be compared."""
    return [
        (
            block.key,
            block.parent_key,
            block.start,
            block.tokens.tolist(),
            [(array.dtype, array.shape, bytes(array.data)) for array in block.arrays],
            block.form,
            [(array.dtype, array.shape, bytes(array.data)) for array in block.state],
        )
        for block in blocks
    ]
