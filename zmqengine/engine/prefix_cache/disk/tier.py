"""The tier on disk, as memory, the engine and the worker call it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.disk_cache import RestorePlan
from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.block import PREFIX_TOKENS_MIN, Checkpoint, StoredBlock, shared_tokens
from zmqengine.engine.prefix_cache.block_pool import LowerTier
from zmqengine.engine.prefix_cache.disk.block_file import HostArray, HostBlock
from zmqengine.engine.prefix_cache.disk.directory import Directory, DiskBounds
from zmqengine.engine.prefix_cache.disk.plan import plan_restore
from zmqengine.engine.prefix_cache.disk.write_thread import Writer
from zmqengine.engine.prefix_cache.store import PrefixCache

FILE_BYTES_MAX = 64 << 20
"""Maximum bytes of one file, into which consecutive blocks are written together."""
PIECE_BYTES = 16 << 20
"""Bytes that a drain copies from the device at once."""
# Seconds after which a drain that waits for the writer looks again.
_WAIT_S = 0.1


def open_tier(
    store: PrefixCache, salt: bytes, options: EngineOptions, wake: Callable[[], None] = lambda: None
) -> DiskTier:
    """Open the tier in `options.cache_path` for a model of this `salt`. Raises `ConfigError` for an unusable path."""
    assert options.cache_path is not None
    bounds = DiskBounds(options.cache_dir_bytes, options.cache_dir_free_bytes, options.cache_dir_writes_bytes)
    directory = Directory(options.cache_path, salt, bounds)
    directory.look()
    return DiskTier(store, directory, wake)


class DiskTier(LowerTier):
    """Copies the blocks of `store` to `directory`, and restores them; the engine's `DiskCache`.

    Blocks of a prompt are copied one after the other and written as one file, a run. `wake` is called by a thread when
    more can be written.
    """

    def __init__(
        self, store: PrefixCache, directory: Directory, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._memory = store.pool.index
        self._cut_anywhere = store.pool.cut_anywhere
        self._directory = directory
        self._writer = Writer(directory, wake)
        # Blocks in memory that are not on disk, the oldest first, and the run that is being copied.
        self._unsaved: dict[bytes, None] = {}
        self._run: list[HostBlock] = []
        self._tokens_per_s = 0.0
        self._not_worth = 0
        store.pool.tier = self

    # --- from memory to disk ---

    def on_add(self, block: StoredBlock) -> None:
        """Note a block, or its checkpoint, that was added to memory."""
        # A checkpoint saves the prefill of all tokens before it, a block only that of its own tokens.
        tokens = len(block.tokens) if block.checkpoint is None else block.end
        if self._is_unsaved(block) and self._is_faster(block.bytes, tokens):
            self._unsaved[block.key] = None

    def on_evict(self, blocks: Sequence[StoredBlock]) -> None:
        """Copy those of the evicted blocks, each the parent of the next, that are not on disk."""
        keys = {block.key for block in blocks}
        if any(block.key in keys for block in self._run):
            self._write_run()
        run: list[HostBlock] = []
        room_bytes = self._writer.room_bytes
        for number, block in enumerate(blocks):
            self._unsaved.pop(block.key, None)
            if not self._is_unsaved(block):
                continue
            room_bytes -= block.bytes
            if room_bytes < 0:
                # Blocks after a missing one would not be found.
                self._writer.count_lost(sum(map(self._is_unsaved, blocks[number:])))
                break
            if run and run[-1].key != block.parent_key:
                self._writer.write(run)
                run = []
            run.append(_to_host(block))
        if run:
            self._writer.write(run)

    def on_clear(self) -> None:
        """Give up blocks that are not written: memory was emptied, as it may be invalid."""
        self._unsaved.clear()
        self._run = []
        self._writer.clear()

    @property
    def has_work(self) -> bool:
        """Whether `save` would copy something."""
        return bool(self._unsaved or self._run) and self._writer.room_bytes >= FILE_BYTES_MAX

    def save(self, bytes_max: int) -> int:
        """Copy blocks for the writer until `bytes_max` or more are copied; returns how many were."""
        done = 0
        while done < bytes_max and self.has_work:
            block = self._next_block()
            if block is not None:
                self._run.append(_to_host(block))
                done += block.bytes
        return done

    def close(self, seconds: float = 0.0, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Save the remaining blocks while `goes_on`, for at most `seconds`, and stop the writer."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and goes_on():
            if self.has_work:
                self.save(PIECE_BYTES)
            elif self._writer.waiting_bytes:
                self._writer.wait(_WAIT_S)
            else:
                break
        self._writer.close(max(0.0, until_s - time.monotonic()))

    def _is_unsaved(self, block: StoredBlock) -> bool:
        if block.end < PREFIX_TOKENS_MIN:
            return False
        has_state = block.checkpoint is not None
        if self._writer.has(block.key, with_state=has_state):
            return False
        location = self._directory.find(block.key)
        return location is None or (has_state and not location.has_state)

    def _next_block(self) -> StoredBlock | None:
        """The next block of the run; None if the run was complete and was passed to the writer, or none is left."""
        if self._run:
            room_bytes = FILE_BYTES_MAX - sum(block.bytes for block in self._run)
            for child in self._memory.following(self._run[-1].key):
                if child.block.key in self._unsaved and child.block.bytes <= room_bytes:
                    return self._take(child.block)
            self._write_run()
            return None
        key = next(iter(self._unsaved))
        node = self._memory.get(key)
        if node is None:
            # A longer block has replaced it.
            del self._unsaved[key]
            return None
        first = next(each for each in node.path() if each.block.key in self._unsaved)
        return self._take(first.block)

    def _take(self, block: StoredBlock) -> StoredBlock | None:
        """Remove a block from the list; None if another worker or an eviction has caused its write already."""
        del self._unsaved[block.key]
        return block if self._is_unsaved(block) else None

    def _write_run(self) -> None:
        self._writer.write(self._run)
        self._run = []

    # --- from disk to memory ---

    def salt(self, scope: str) -> bytes:
        """Root of the chain for prompts in this scope."""
        return self._store.salt(scope)

    def plan(self, tokens: np.ndarray, salt: bytes) -> RestorePlan | None:
        """The blocks to read for a prompt, if that is faster than its prefill. Does not wait for the disk."""
        # The last token starts the decode.
        plan = plan_restore(tokens[:-1], salt, self._memory, self._directory, cut_anywhere=self._cut_anywhere)
        if plan is not None and not self._is_faster(plan.bytes, plan.tokens):
            self._not_worth += 1
            return None
        return plan

    def read(self, plan: RestorePlan, tokens: np.ndarray) -> deque[HostBlock]:
        """Read the blocks of a plan up to the first that is gone, damaged or different. Any thread may call it."""
        blocks: deque[HostBlock] = deque()
        for block in self._directory.read(plan.keys):
            shared = shared_tokens(block.tokens, tokens[block.start : block.start + block.length])
            if shared < block.length and not (self._cut_anywhere and shared >= PREFIX_TOKENS_MIN):
                break
            blocks.append(block)
        while blocks and not (self._cut_anywhere or blocks[-1].form):
            blocks.pop()
        return blocks

    def restore(self, blocks: deque[HostBlock], bytes_max: int, awaited_by: Hashable) -> None:
        """Add the first of `blocks`, `bytes_max` or a little more, to memory and hold them until `release`.

        Removes them from `blocks`, and all others where memory has no room for more."""
        taken: list[HostBlock] = []
        while blocks and bytes_max > 0:
            taken.append(blocks.popleft())
            bytes_max -= taken[-1].bytes
        if (
            taken
            and self._store.insert_blocks(list(map(_from_host, taken)), awaited_by)
            < taken[-1].start + taken[-1].length
        ):
            blocks.clear()

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks that were restored for a request."""
        self._store.release(awaited_by)

    # --- speeds and figures ---

    def note_prefill(self, tokens_per_s: float) -> None:
        """Note the speed of prefill. Blocks whose restore takes longer than their prefill are neither written nor
        read."""
        self._tokens_per_s = tokens_per_s

    @property
    def description(self) -> dict[str, str]:
        """Directory and speeds in words, for the log."""
        rate = self._directory.read_rate.bytes_per_s
        return {
            "directory": str(self._directory.path),
            "blocks": str(len(self._directory)),
            "read": f"at {rate / 1e6:.0f} MB/s" if rate else "at a speed that is not known",
            "computed": f"at {self._tokens_per_s:.0f} tokens/s",
        }

    def numbers(self) -> dict[str, int]:
        """Figures for `status`."""
        return {
            **self._directory.counts,
            "blocks": len(self._directory),
            "unsaved_blocks": len(self._unsaved) + len(self._run),
            "waiting_bytes": self._writer.waiting_bytes,
            "not_worth": self._not_worth,
        }

    def _is_faster(self, bytes_: int, tokens: int) -> bool:
        """Whether a restore of `bytes_` is faster than the prefill of `tokens`; True while a speed is unknown."""
        seconds = self._directory.read_rate.seconds(bytes_)
        return not self._tokens_per_s or seconds < tokens / self._tokens_per_s


def _to_host(block: StoredBlock) -> HostBlock:
    """Copy a block to the host. Waits until its arrays are computed, and launches nothing."""
    form = "" if block.checkpoint is None else block.checkpoint.form
    arrays = [
        HostArray(str(array.dtype).removeprefix("mlx.core."), tuple(array.shape), memoryview(array).tobytes())
        for array in block.all_arrays()
    ]
    count = len(block.arrays)
    return HostBlock(
        block.key, block.parent_key, block.start, block.tokens, arrays[:count], form, arrays[count:]
    )


def _from_host(block: HostBlock) -> StoredBlock:
    """Copy a block to arrays of MLX."""
    arrays = tuple(map(_array, block.arrays))
    checkpoint = Checkpoint(block.form, tuple(map(_array, block.state))) if block.form else None
    return StoredBlock(block.key, block.parent_key, block.start, block.tokens, arrays, checkpoint)


def _array(array: HostArray) -> Any:
    # NumPy has no bfloat16: its bytes are viewed as another type.
    is_bfloat16 = array.dtype == "bfloat16"
    kind = np.dtype("uint16" if is_bfloat16 else array.dtype)
    numbers = np.frombuffer(array.data, kind) if len(array.data) else np.zeros(0, kind)
    built = mx.array(numbers.reshape(array.shape))
    return built.view(mx.bfloat16) if is_bfloat16 else built
