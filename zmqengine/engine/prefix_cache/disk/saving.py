"""Which blocks go to disk, and when: those that are not there yet, a piece a pass, and what memory has no room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from zmqengine.engine.prefix_cache.block import PREFIX_TOKENS_MIN, StoredBlock
from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.disk.host_arrays import to_host
from zmqengine.engine.prefix_cache.disk.host_block import HostArray, HostBlock
from zmqengine.engine.prefix_cache.disk.writer import Writer

FILE_BYTES_MAX = 64 << 20
LOSSES = ("evicted", "refused", "slow_disk")
"""Why a block went from memory and is not on disk: too many went at once, the writer refuses, it has no room."""
EVICTED_BYTES_MAX = 32 << 20
"""Bytes copied in one pass of blocks that memory evicts before they were written."""


class Saving:
    """Copies kept blocks to the host, as much at a time as the caller says, and hands them to the writer in runs:
    blocks that follow one another, about `FILE_BYTES_MAX` at the most.

    `find` gives a block that is in memory by its key. For the actor alone.
    """

    def __init__(
        self, directory: Directory, writer: Writer, find: Callable[[bytes], StoredBlock | None]
    ) -> None:
        self.lost: Counter[str] = Counter()
        """Blocks that went from memory and were not written, by reason."""
        self._directory = directory
        self._writer = writer
        self._find = find
        self._unsaved: dict[bytes, bytes] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self._run: list[StoredBlock] = []
        self._copied: list[HostBlock] = []
        self._copying: Iterator[int] = iter(())
        self._evicted: list[HostBlock] = []
        self._evicted_room = EVICTED_BYTES_MAX
        self._handed_over: set[tuple[bytes, bool]] = set()

    @property
    def unsaved(self) -> int:
        """Blocks that are not yet with the writer."""
        return len(self._unsaved) + len(self._run) + len(self._evicted)

    @property
    def has_work(self) -> bool:
        """Whether there is something to write, and somebody who takes it."""
        waiting = self._unsaved or self._run or self._evicted
        return bool(waiting) and not self._writer.is_refusing and self._writer.room_bytes >= FILE_BYTES_MAX

    def add(self, block: StoredBlock) -> None:
        """This block is in memory from now on, or its checkpoint is."""
        if block.key not in self._unsaved and self._is_wanted(block):
            self._unsaved[block.key] = block.parent_key
            self._children.setdefault(block.parent_key, []).append(block.key)

    def evict(self, blocks: Sequence[StoredBlock]) -> None:
        """These are about to go from memory, each the parent of the next: copy what would be lost."""
        copied = {block.key for block in self._copied}
        for number, block in enumerate(blocks):
            self._discard(block.key)
            places = [place for place, each in enumerate(self._run) if each.key == block.key]
            if block.key in copied or not self._is_wanted(block):
                continue
            if places:
                del self._run[places[0] :]
            if self._writer.is_refusing or self._evicted_room < block.bytes:
                # Nobody would find what follows.
                reason = "refused" if self._writer.is_refusing else "evicted"
                self.lost[reason] += sum(map(self._is_wanted, blocks[number:]))
                return
            self._evicted_room -= block.bytes
            self._evicted.append(self._copy(block, [to_host(array) for array in block.all_arrays()]))

    def save(self, bytes_max: int, *, newest_first: bool = False) -> int:
        """Go on copying until `bytes_max` are, and one array more at the most; returns how many were."""
        self._evicted_room = EVICTED_BYTES_MAX
        if not self._writer.waiting_bytes:
            self._handed_over.clear()
        self._hand_over_evicted()
        done = 0
        while done < bytes_max and self.has_work:
            if not self._run:
                self._run = self._next_run(newest_first)
                self._copying = self._copy_run()
            done += next(self._copying, 0)
        return done

    def clear(self) -> None:
        """Forget the blocks in memory, which may be invalid."""
        self._unsaved.clear()
        self._children.clear()
        self._run, self._copied, self._evicted = [], [], []
        self._writer.unwritten.clear()

    def _is_wanted(self, block: StoredBlock) -> bool:
        """Whether it is worth a write, and not written or being written."""
        has_state = block.checkpoint is not None
        if block.end < PREFIX_TOKENS_MIN:
            return False
        if (block.key, has_state) in self._handed_over:
            return False
        place = self._directory.find(block.key)
        return place is None or (has_state and not place.has_state)

    def _discard(self, key: bytes) -> None:
        parent_key = self._unsaved.pop(key, None)
        if parent_key is not None:
            self._children[parent_key].remove(key)
            if not self._children[parent_key]:
                del self._children[parent_key]

    def _next_run(self, newest_first: bool) -> list[StoredBlock]:
        """Unsaved blocks that follow one another, with the oldest or newest of them in it."""
        block: StoredBlock | None = None
        while block is None and self._unsaved:
            block = self._take(next(reversed(self._unsaved) if newest_first else iter(self._unsaved)))
        if block is None:
            return []
        run = [block]
        while (before := self._take(run[0].parent_key)) is not None:
            run.insert(0, before)
        while (after := next(map(self._take, list(self._children.get(run[-1].key, ()))), None)) is not None:
            run.append(after)
        taken = 0
        for number, each in enumerate(run):
            taken += each.bytes
            if number and taken > FILE_BYTES_MAX:
                for left in run[number:]:
                    self.add(left)
                return run[:number]
        return run

    def _take(self, key: bytes) -> StoredBlock | None:
        if key not in self._unsaved:
            return None
        self._discard(key)
        block = self._find(key)
        return block if block is not None and self._is_wanted(block) else None

    def _copy_run(self) -> Iterator[int]:
        """Yields the bytes of each array that it has copied."""
        while len(self._copied) < len(self._run):
            block = self._run[len(self._copied)]
            arrays = []
            for array in block.all_arrays():
                arrays.append(to_host(array))
                yield len(arrays[-1].data)
            # Unless it went from memory meanwhile.
            if len(self._copied) < len(self._run):
                self._copied.append(self._copy(block, arrays))
        copied, self._copied, self._run = self._copied, [], []
        self._hand_over(copied)

    def _copy(self, block: StoredBlock, arrays: list[HostArray]) -> HostBlock:
        copied = _with_arrays(block, arrays)
        self._writer.unwritten.add(copied)
        return copied

    def _hand_over(self, blocks: list[HostBlock]) -> None:
        if blocks:
            self._handed_over |= {(block.key, bool(block.form)) for block in blocks}
            self._writer.write(blocks)

    def _hand_over_evicted(self) -> None:
        """They went leaf by leaf: put what follows one another together again."""
        evicted = {block.key: block for block in self._evicted}
        following = {block.parent_key: block for block in self._evicted}
        self._evicted = []
        for block in evicted.values():
            if block.parent_key in evicted and following[block.parent_key] is block:
                continue
            run = [block]
            while (after := following.get(run[-1].key)) is not None:
                run.append(after)
            if sum(each.bytes for each in run) > self._writer.room_bytes:
                self.lost["slow_disk"] += len(run)
                self._writer.unwritten.remove(run)
            else:
                self._hand_over(run)


def _with_arrays(block: StoredBlock, arrays: list[HostArray]) -> HostBlock:
    count = len(block.arrays)
    form = "" if block.checkpoint is None else block.checkpoint.form
    return HostBlock(
        block.key, block.parent_key, block.start, block.tokens, arrays[:count], form, arrays[count:]
    )
