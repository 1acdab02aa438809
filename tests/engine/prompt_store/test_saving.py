"""What is in memory gets to disk once, in whatever order blocks come, are copied and go."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.engine.prompt_store.host_blocks import ROOMY, SALT, chain
from zmqengine.engine.prefix_cache.block import Checkpoint, StoredBlock
from zmqengine.engine.prefix_cache.disk import saving
from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.disk.room import Bounds
from zmqengine.engine.prefix_cache.disk.saving import Saving
from zmqengine.engine.prefix_cache.disk.writer import Writer

WAIT_S = 60.0


def stored(seed: int, count: int, parent: StoredBlock | None = None) -> list[StoredBlock]:
    """Blocks with arrays of NumPy, which are as good as MLX's to whoever only copies them."""
    found: list[StoredBlock] = []
    begin = 0 if parent is None else parent.end
    for block in chain(seed, count, **({} if parent is None else {"parent": parent.key})):  # type: ignore[arg-type]
        arrays = tuple(np.frombuffer(array.data, np.float32) for array in block.arrays)
        found.append(StoredBlock(block.key, block.parent_key, begin + block.start, block.tokens, arrays))
    return found


def with_state(block: StoredBlock) -> StoredBlock:
    return replace(block, checkpoint=Checkpoint("state", (np.frombuffer(block.key, np.uint32),)))


class Memory:
    """What a store would hold, and the saving that is told of it."""

    def __init__(self, path: Path, bounds: Bounds = ROOMY) -> None:
        self.blocks: dict[bytes, StoredBlock] = {}
        self.directory = Directory(path, SALT, bounds)
        self.writer = Writer(self.directory)
        self.saving = Saving(self.directory, self.writer, self.blocks.get)

    def add(self, *blocks: StoredBlock) -> None:
        for block in blocks:
            self.blocks[block.key] = block
            self.saving.add(block)

    def evict(self, *blocks: StoredBlock) -> None:
        for block in blocks:
            del self.blocks[block.key]
        self.saving.evict(blocks)

    def save_all(self) -> None:
        self.saving.save(0)
        while self.saving.has_work or self.writer.waiting_bytes:
            if self.saving.has_work:
                self.saving.save(1000)
            else:
                self.writer.wait(0.1)

    def close(self) -> Directory:
        """Save everything; the directory as the next worker finds it."""
        self.save_all()
        assert self.writer.close(WAIT_S)
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
    memory.saving.save(1)
    memory.evict(*blocks[3:])
    memory.saving.save(1)
    memory.evict(*blocks[:3])
    directory = memory.close()
    for block in blocks:
        assert_saved(directory, block)
    assert memory.directory.totals.written_blocks == 5
    assert not memory.saving.lost


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
    assert memory.directory.totals.written_blocks == 3


def test_too_much_at_once_is_lost_and_counted(tmp_path: Path, monkeypatch) -> None:
    """A pass may copy so much and no more; what would follow a lost block is not copied either."""
    memory = Memory(tmp_path)
    blocks = stored(0, 5)
    monkeypatch.setattr(saving, "EVICTED_BYTES_MAX", 2 * blocks[0].bytes)
    memory.saving.save(0)
    memory.add(*blocks)
    memory.evict(*blocks)
    directory = memory.close()
    assert len(directory) == 2
    assert memory.saving.lost == {"evicted": 3}


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
                memory.saving.save(numbers.randrange(600))
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
    assert not memory.saving.lost
    for block in latest.values():
        assert_saved(directory, block)
    # A state that came before its block was copied went with it.
    assert len(latest) <= memory.directory.totals.written_blocks <= written
