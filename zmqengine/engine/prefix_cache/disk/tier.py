"""The store's tier on disk, as the engine and the worker know it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from zmqengine.engine.options import EngineOptions
from zmqengine.engine.prefix_cache.block import Checkpoint, StoredBlock
from zmqengine.engine.prefix_cache.disk.block_header import FAULTS
from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.disk.host_arrays import from_host
from zmqengine.engine.prefix_cache.disk.host_block import HostBlock
from zmqengine.engine.prefix_cache.disk.restoring import Plan, Restoring
from zmqengine.engine.prefix_cache.disk.room import Bounds
from zmqengine.engine.prefix_cache.disk.saving import LOSSES, Saving
from zmqengine.engine.prefix_cache.disk.writer import REASONS, Writer
from zmqengine.engine.prefix_cache.pool import LowerTier
from zmqengine.engine.prefix_cache.store import PrefixCache

PIECE_BYTES = 16 << 20
_WAIT_S = 0.1


def open_tier(
    store: PrefixCache, salt: bytes, options: EngineOptions, ring: Callable[[], None] = lambda: None
) -> DiskTier:
    """The tier in `options.cache_path`, of a model of this `salt`. Raises `ConfigError` for an unusable path."""
    assert options.cache_path is not None
    bounds = Bounds(options.cache_dir_bytes, options.cache_dir_free_bytes, options.cache_dir_writes_bytes)
    return DiskTier(store, Directory(options.cache_path, salt, bounds), ring)


class DiskTier(LowerTier):
    """Keeps what `store` keeps in `directory` as well, and gives it back to this and to later workers.

    `plan` and `read` may be called by any thread, all else by the actor; nothing waits for the disk but `read`,
    `measure` and `close`. `ring` is called by a thread when there is room to write more.
    """

    def __init__(
        self, store: PrefixCache, directory: Directory, ring: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._directory = directory
        self._writer = Writer(directory, ring)
        self._saving = Saving(directory, self._writer, self._find)
        self._restoring = Restoring(
            directory, self._writer.unwritten, self._find, cut_anywhere=store.pool.cut_anywhere
        )
        store.pool.tier = self

    # --- from memory to disk ---

    def on_add(self, block: StoredBlock) -> None:
        """This block is in memory from now on, or its checkpoint is."""
        # With its checkpoint a prompt goes on from here, whatever the beginning took.
        tokens = len(block.tokens) if block.checkpoint is None else block.end
        if self._restoring.is_faster(block.bytes, tokens):
            self._saving.add(block)

    def on_evict(self, blocks: Sequence[StoredBlock]) -> None:
        """These blocks, each the parent of the next, are about to go from memory."""
        self._saving.evict(blocks)

    def on_clear(self) -> None:
        """The store has dropped everything, as it may not be good."""
        self._saving.clear()

    @property
    def has_work(self) -> bool:
        """Whether `save` would do something."""
        return self._saving.has_work

    def save(self, bytes_max: int) -> int:
        """Copy about so many bytes of what is not on disk yet for the thread that writes; returns how many."""
        return self._saving.save(bytes_max)

    def close(self, seconds: float = 0.0, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Write what is left, the latest first, while `goes_on` and for so many seconds at the most; then no more."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and goes_on():
            if self._saving.has_work:
                self._saving.save(PIECE_BYTES, newest_first=True)
            elif self._writer.waiting_bytes:
                self._writer.wait(_WAIT_S)
            else:
                break
        self._writer.close(max(0.0, until_s - time.monotonic()))

    # --- from disk to memory ---

    def note_reading(self, tokens_per_s: float) -> None:
        """How fast the model reads prompts. What would come back slower is neither restored nor written."""
        self._restoring.tokens_per_s = tokens_per_s

    def salt(self, scope: str) -> bytes:
        """Root of the hash chain for prompts in this scope."""
        return self._store.salt(scope)

    def plan(self, tokens: np.ndarray, salt: bytes) -> Plan:
        """Which blocks to read for a prompt."""
        return self._restoring.plan(tokens, salt)

    def read(self, plan: Plan, tokens: np.ndarray) -> deque[HostBlock]:
        """Read them. What is gone or damaged is left out, and what follows it."""
        return deque(self._restoring.read(plan, tokens))

    def restore(self, blocks: deque[HostBlock], bytes_max: int, awaited_by: Hashable) -> None:
        """Put the first of `blocks` into memory, about so many bytes, and take them off; all of them where memory has
        no room for more. There they stay until `release`, as long as nothing else needs the room."""
        taken: list[HostBlock] = []
        while blocks and bytes_max > 0:
            taken.append(blocks.popleft())
            bytes_max -= taken[-1].bytes
        made = self._made(taken)
        if made and self._store.insert_blocks(made, awaited_by) < made[-1].end:
            blocks.clear()

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks that were restored for a request, used or not."""
        self._store.release(awaited_by)

    def measure(self) -> None:
        """Find out how fast blocks come back, if there are any."""
        self._directory.look()
        blocks = self._restoring.read_timed(self._directory.largest_file())
        self._made(blocks)

    @property
    def told(self) -> dict[str, str]:
        """Measured speeds in words."""
        restoring = self._restoring
        speed = restoring.speed
        rates = {"read": speed.read_bytes_per_s, "made arrays": speed.made_bytes_per_s}
        known = [f"{name} at {rate / 1e6:.0f} MB/s" for name, rate in rates.items() if rate]
        return {
            "directory": str(self._directory.path),
            "blocks": str(len(self._directory)),
            "speed": ", ".join(known) or "not known",
            "computed": f"at {restoring.tokens_per_s:.0f} tokens/s",
        }

    def numbers(self) -> dict[str, int]:
        """For `status`."""
        totals, restoring = self._directory.totals, self._restoring
        return {
            "bytes": totals.bytes,
            "files": totals.files,
            "blocks": len(self._directory),
            "unsaved_blocks": self._saving.unsaved,
            "waiting_bytes": self._writer.waiting_bytes,
            "written_today_bytes": totals.written_today,
            "written_blocks": totals.written_blocks,
            "read_blocks": totals.read_blocks,
            "removed_files": totals.removed_files,
            "not_worth": restoring.not_worth,
            **{f"skipped_{fault}": self._directory.faults[fault] for fault in FAULTS},
            **{f"refused_{reason}": self._writer.refused[reason] for reason in REASONS},
            **{f"lost_{reason}": self._saving.lost[reason] for reason in LOSSES},
        }

    def _find(self, key: bytes) -> StoredBlock | None:
        # Nothing but a look into a dict: threads may do it.
        node = self._store.pool.index.get(key)
        return None if node is None else node.block

    def _made(self, blocks: Sequence[HostBlock]) -> list[StoredBlock]:
        started_s = time.perf_counter()
        made = list(map(_stored, blocks))
        self._restoring.speed.note_made(sum(block.bytes for block in blocks), time.perf_counter() - started_s)
        return made


def _stored(block: HostBlock) -> StoredBlock:
    arrays = tuple(map(from_host, block.arrays))
    checkpoint = Checkpoint(block.form, tuple(map(from_host, block.state))) if block.form else None
    return StoredBlock(block.key, block.parent_key, block.start, block.tokens, arrays, checkpoint)
