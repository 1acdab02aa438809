"""Saving: every block reaches the disk once, in whatever order blocks are added, copied and evicted."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.prefix_cache.host_blocks import ROOMY, SALT, chain
from zmqengine.engine.prefix_cache.block import Checkpoint, StoredBlock
from zmqengine.engine.prefix_cache.disk import write_thread
from zmqengine.engine.prefix_cache.disk.directory import Directory, DiskBounds
from zmqengine.engine.prefix_cache.disk.tier import DiskTier
from zmqengine.engine.prefix_cache.store import PrefixCache

WAIT_S = 60.0


def stored(seed: int, count: int, parent: StoredBlock | None = None) -> list[StoredBlock]:
    """Blocks with arrays of NumPy, which are copied as those of MLX are."""
    found: list[StoredBlock] = []
    begin = 0 if parent is None else parent.end
    for block in chain(seed, count, **({} if parent is None else {"parent": parent.key})):  # type: ignore[arg-type]
        arrays = tuple(np.frombuffer(array.data, np.float32) for array in block.arrays)
        found.append(StoredBlock(block.key, block.parent_key, begin + block.start, block.tokens, arrays))
    return found


def with_state(block: StoredBlock) -> StoredBlock:
    return replace(block, checkpoint=Checkpoint("state", (np.frombuffer(block.key, np.uint32),)))


class Memory:
    """Blocks in memory, and the tier below that is told of them."""

    def __init__(self, path: Path, bounds: DiskBounds = ROOMY) -> None:
        self.store = PrefixCache(None, list, 1 << 30, {})
        self.directory = Directory(path, SALT, bounds)
        self.written = threading.Event()
        self.tier = DiskTier(self.store, self.directory, self.written.set)

    @property
    def blocks(self) -> dict[bytes, StoredBlock]:
        return {node.block.key: node.block for node in self.store.pool.index}

    def add(self, *blocks: StoredBlock) -> None:
        for block in blocks:
            node = self.store.pool.index.get(block.key)
            if node is None:
                assert self.store.pool.add(block) is not None
            elif block.checkpoint is not None:
                self.store.pool.add_checkpoint(node, block.checkpoint)

    def evict(self, *blocks: StoredBlock) -> None:
        for block in reversed(blocks):
            node = self.store.pool.index.get(block.key)
            assert node is not None
            self.store.pool.index.remove(node)
        self.tier.on_evict(blocks)

    def number(self, name: str) -> int:
        return self.tier.numbers()[name]

    def save_all(self) -> None:
        while True:
            self.written.clear()
            if self.tier.has_work:
                self.tier.save(1000)
            elif self.number("waiting_bytes"):
                assert self.written.wait(WAIT_S)
            else:
                return

    def close(self) -> Directory:
        """Save everything; the directory as the next worker finds it."""
        self.save_all()
        self.tier.close(WAIT_S)
        found = Directory(self.directory.path.parent, SALT, ROOMY)
        found.look()
        return found


def assert_saved(directory: Directory, block: StoredBlock) -> None:
    (found,) = directory.read([block.key])
    assert (found.parent_key, found.start, found.tokens.tolist()) == (
        block.parent_key, block.start, block.tokens.tolist(),
    )  # fmt: skip
    assert [bytes(array.data) for array in found.arrays] == [array.tobytes() for array in block.arrays]
    if block.checkpoint is not None:
        assert [bytes(array.data) for array in found.state] == [
            array.tobytes() for array in block.checkpoint.arrays
        ]


def test_blocks_that_follow_one_another_are_one_file(tmp_path: Path) -> None:
    """Also when they came one by one, and those that turn off are in a file of their own."""
    memory = Memory(tmp_path)
    trunk = stored(0, 4)
    branch = stored(1, 2, parent=trunk[1])
    memory.add(*trunk, *branch)
    directory = memory.close()
    assert len(list(directory.path.glob("*.safetensors"))) == 2
    for block in (*trunk, *branch):
        assert_saved(directory, block)


def test_what_goes_while_it_is_copied_is_written_all_the_same(tmp_path: Path) -> None:
    """Once, and nothing that was written before is written again."""
    memory = Memory(tmp_path)
    blocks = stored(0, 5)
    memory.add(*blocks)
    memory.tier.save(1)
    memory.evict(*blocks[3:])
    memory.tier.save(1)
    memory.evict(*blocks[:3])
    directory = memory.close()
    for block in blocks:
        assert_saved(directory, block)
    assert memory.number("written_blocks") == 5
    assert not memory.number("lost_slow_disk")


def test_a_state_that_comes_later_is_written_later(tmp_path: Path) -> None:
    """A block may be on disk before its state is worth keeping."""
    memory = Memory(tmp_path)
    blocks = stored(0, 2)
    memory.add(*blocks)
    memory.save_all()
    place = memory.directory.find(blocks[1].key)
    assert place is not None
    assert not place.has_state
    state = with_state(blocks[1])
    memory.add(state)
    memory.add(state)
    directory = memory.close()
    assert_saved(directory, state)
    assert memory.number("written_blocks") == 3


def test_too_much_at_once_is_lost_and_counted(tmp_path: Path, monkeypatch) -> None:
    """Memory does not wait for the disk: what the writer has no room for is lost, and what would follow it."""
    memory = Memory(tmp_path)
    blocks = stored(0, 5)
    monkeypatch.setattr(write_thread, "QUEUE_BYTES_MAX", 2 * blocks[0].bytes)
    memory.add(*blocks)
    memory.evict(*blocks)
    directory = memory.close()
    assert len(directory) == 2
    assert memory.number("lost_slow_disk") == 3


def test_a_disk_that_hangs_delays_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a write nor a scan that takes for ever: the actor adds, copies, looks up and evicts meanwhile."""
    memory = Memory(tmp_path)
    gate = threading.Event()
    for call in ("fsync", "listdir"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *args, real=real: gate.wait(WAIT_S) and real(*args))
    scan = threading.Thread(target=memory.directory.look)
    scan.start()
    first, second = stored(0, 4), stored(1, 4)
    memory.add(*first)
    memory.tier.save(1 << 20)
    memory.add(*second)
    memory.evict(*second)
    assert scan.is_alive()
    assert memory.number("written_blocks") == 0
    gate.set()
    scan.join(WAIT_S)
    directory = memory.close()
    for block in (*first, *second):
        assert_saved(directory, block)


def test_what_was_cleared_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is cleared where it may be invalid: no other worker is to read that."""
    memory = Memory(tmp_path)
    gate, write = threading.Event(), memory.directory.write
    monkeypatch.setattr(memory.directory, "write", lambda blocks: gate.wait(WAIT_S) and write(blocks))
    runs = [stored(seed, 2) for seed in range(4)]
    for run in runs[:3]:
        memory.add(*run)
        memory.tier.save(1 << 20)
    memory.add(*runs[3])
    memory.store.clear()
    gate.set()
    directory = memory.close()
    # A write that has begun goes on.
    assert len(directory) <= 2
    for run in runs[1:]:
        assert directory.read([block.key for block in run]) == []


def test_any_order_of_coming_copying_and_going_is_right(tmp_path: Path) -> None:
    """What was in memory is on disk in the end, in its last form, and was written once in that form."""
    numbers = random.Random(7)
    memory = Memory(tmp_path)
    latest: dict[bytes, StoredBlock] = {}
    written = 0
    seed = 0
    for _ in range(400):
        match numbers.randrange(5):
            case 0 | 1:
                seed += 1
                kept = list(memory.blocks.values())
                parent = numbers.choice(kept) if kept and numbers.random() < 0.7 else None
                blocks = stored(seed, numbers.randint(1, 4), parent)
                memory.add(*blocks)
                latest |= {block.key: block for block in blocks}
                written += len(blocks)
            case 2:
                memory.tier.save(numbers.randrange(600))
            case 3:
                parents = {block.parent_key for block in memory.blocks.values()}
                leaves = [block for block in memory.blocks.values() if block.key not in parents]
                if leaves:
                    run = [numbers.choice(leaves)]
                    children = [block.parent_key for block in memory.blocks.values()]
                    while len(run) < 3 and (before := memory.blocks.get(run[0].parent_key)) is not None:
                        if children.count(before.key) > 1:
                            break
                        run.insert(0, before)
                    memory.evict(*run)
            case 4:
                kept = [block for block in memory.blocks.values() if block.checkpoint is None]
                if kept:
                    state = with_state(numbers.choice(kept))
                    memory.add(state)
                    latest[state.key] = state
                    written += 1
    directory = memory.close()
    assert not memory.number("lost_slow_disk")
    for block in latest.values():
        assert_saved(directory, block)
    # A state that came before its block was copied went with it.
    assert len(latest) <= memory.number("written_blocks") <= written
