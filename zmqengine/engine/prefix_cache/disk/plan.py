"""Plan of a restore: which blocks of a prompt to read from disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zmqengine.engine.disk_cache import RestorePlan
from zmqengine.engine.prefix_cache.block import BLOCK_TOKENS, PREFIX_TOKENS_MIN, block_keys, chained
from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.index import BlockIndex


def plan_restore(
    tokens: np.ndarray, salt: bytes, memory: BlockIndex, directory: Directory, *, cut_anywhere: bool
) -> RestorePlan | None:
    """The blocks on disk that give a longer prefix of `tokens` than memory does; None if there are none.

    Where caches are not `cut_anywhere`, the last of them has a checkpoint. Any thread may call it.
    """
    in_memory = usable = best = best_bytes = bytes_ = 0
    keys: list[bytes] = []
    wanted: list[bytes] = []
    for key, end in _known_blocks(tokens, salt, memory, directory, cut_anywhere=cut_anywhere):
        keys.append(key)
        node, location = memory.get(key), directory.find(key)
        is_in_memory = node is not None and in_memory == len(keys) - 1
        in_memory += is_in_memory
        if is_in_memory and node is not None and (cut_anywhere or node.block.checkpoint is not None):
            usable = end
        elif location is None:
            continue
        elif cut_anywhere or location.has_state:
            # All blocks that memory lacks, up to this one; of one that it has, the checkpoint.
            wanted = keys[min(in_memory, len(keys) - 1) :]
            best, best_bytes = end, bytes_ + location.bytes
        bytes_ += 0 if is_in_memory or location is None else location.bytes
    return RestorePlan(wanted, best_bytes, best - usable) if best > usable else None


def _known_blocks(
    tokens: np.ndarray, salt: bytes, memory: BlockIndex, directory: Directory, *, cut_anywhere: bool
) -> Iterator[tuple[bytes, int]]:
    """Keys of the first blocks of a prompt, in memory or on disk, and the position in it where each ends.

    The last one may be short, or be longer than the rest of the prompt.
    """
    before, end = salt, 0
    for key in block_keys(tokens.tolist(), salt):
        if memory.get(key) is None and directory.find(key) is None:
            break
        before, end = key, end + BLOCK_TOKENS
        yield key, end
    following = directory.following(before)
    for count in sorted(set(following.values()), reverse=True):
        key = chained(before, tokens[end : end + count].tolist())
        if end + count <= len(tokens) and key in following:
            yield key, end + count
            return
    # A block longer than the rest is named by more tokens than are known here: a single one is read and compared.
    if cut_anywhere and len(following) == 1 and len(tokens) - end >= PREFIX_TOKENS_MIN:
        yield next(iter(following)), len(tokens)
