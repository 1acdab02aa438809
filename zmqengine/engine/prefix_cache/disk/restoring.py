"""Restoring prompts from disk, where that is faster than to compute them. Runs on threads beside the actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zmqengine.engine.prefix_cache.block import (
    BLOCK_TOKENS,
    PREFIX_TOKENS_MIN,
    StoredBlock,
    block_keys,
    chained,
    shared_tokens,
)
from zmqengine.engine.prefix_cache.disk.directory import Directory
from zmqengine.engine.prefix_cache.disk.file_index import Place
from zmqengine.engine.prefix_cache.disk.host_block import HostBlock
from zmqengine.engine.prefix_cache.disk.unwritten import Unwritten

_RATE_KEPT = 0.7
# Less says nothing about bytes a second.
_MEASURED_BYTES_MIN = 1 << 18


class Speed:
    """Bytes a second from the file to arrays: read and checked on a thread, made arrays by the actor. 0: not known."""

    def __init__(self) -> None:
        self.read_bytes_per_s = 0.0
        self.made_bytes_per_s = 0.0

    def note_read(self, bytes_: int, seconds: float) -> None:
        """Account for bytes that were read."""
        self.read_bytes_per_s = _mixed(self.read_bytes_per_s, bytes_, seconds)

    def note_made(self, bytes_: int, seconds: float) -> None:
        """Account for bytes that became arrays."""
        self.made_bytes_per_s = _mixed(self.made_bytes_per_s, bytes_, seconds)

    def seconds(self, bytes_: int) -> float:
        """Estimated cost of restoring."""
        rates = (self.read_bytes_per_s, self.made_bytes_per_s)
        return sum(bytes_ / rate for rate in rates if rate)


class Plan(NamedTuple):
    """Blocks that are missing in memory and are on disk, each the parent of the next; what they take; and how many
    tokens of the prompt need not be read for them."""

    keys: list[bytes]
    bytes: int
    tokens: int


NOTHING = Plan([], 0, 0)


class Restoring:
    """Finds and reads blocks. `find` gives a block that is in memory by its key; it may be asked from any thread. What
    is `unwritten` counts as on disk.

    Where prompts are not `cut_anywhere`, all that is restored ends with a block that has a state.
    """

    def __init__(
        self,
        directory: Directory,
        unwritten: Unwritten,
        find: Callable[[bytes], StoredBlock | None],
        *,
        cut_anywhere: bool,
    ) -> None:
        self.speed = Speed()
        self.tokens_per_s = 0.0
        """How fast the model reads prompts; 0: not known."""
        self.not_worth = 0
        """Prompts that were sooner read again than restored."""
        self._directory = directory
        self._unwritten = unwritten
        self._find = find
        self._cut_anywhere = cut_anywhere

    def is_faster(self, bytes_: int, tokens: int) -> bool:
        """Whether so many bytes are back sooner than the model has read so many tokens, as far as that is known."""
        return not self.tokens_per_s or self.speed.seconds(bytes_) < tokens / self.tokens_per_s

    def plan(self, tokens: np.ndarray, salt: bytes) -> Plan:
        """The blocks to read for a prompt, if that is faster than to compute it."""
        self._directory.look()
        # A row needs one token to start from.
        plan = self._plan(tokens[:-1], salt)
        if plan.keys and not self.is_faster(plan.bytes, plan.tokens):
            self.not_worth += 1
            return NOTHING
        return plan

    def read(self, plan: Plan, tokens: np.ndarray) -> list[HostBlock]:
        """The blocks of a plan, as far as they are still there, whole, and hold these tokens: the last one some."""
        good: list[HostBlock] = []
        for block in self._read(plan.keys):
            mine = tokens[block.start : block.start + len(block.tokens)]
            shared = shared_tokens(block.tokens, mine)
            if shared < len(block.tokens) and not (self._cut_anywhere and shared >= PREFIX_TOKENS_MIN):
                break
            good.append(block)
        while good and not (self._cut_anywhere or good[-1].form):
            good.pop()
        return good

    def read_timed(self, keys: Sequence[bytes]) -> list[HostBlock]:
        """The blocks of `keys`, each the parent of the next; `speed` learns from it."""
        started_s = time.perf_counter()
        blocks = self._directory.read(keys)
        self.speed.note_read(sum(block.bytes for block in blocks), time.perf_counter() - started_s)
        return blocks

    def _place(self, key: bytes) -> Place | None:
        block = self._unwritten.find(key)
        if block is None:
            return self._directory.find(key)
        return Place("", 0, block.parent_key, len(block.tokens), block.bytes, bool(block.form))

    def _read(self, keys: Sequence[bytes]) -> list[HostBlock]:
        blocks: list[HostBlock] = []
        while len(blocks) < len(keys):
            left = keys[len(blocks) :]
            block = self._unwritten.find(left[0])
            if block is not None:
                self._directory.totals.read_blocks += 1
                blocks.append(block)
                continue
            count = next((at for at, key in enumerate(left) if self._unwritten.find(key)), len(left))
            found = self.read_timed(left[:count])
            blocks += found
            if len(found) < count:
                break
        return blocks

    def _plan(self, tokens: np.ndarray, salt: bytes) -> Plan:
        in_memory = usable = best = best_bytes = bytes_ = 0
        keys: list[bytes] = []
        wanted: list[bytes] = []
        for key, end in self._known(tokens, salt):
            keys.append(key)
            kept, place = self._find(key), self._place(key)
            is_kept = kept is not None and in_memory == len(keys) - 1
            in_memory += is_kept
            if is_kept and kept is not None and (self._cut_anywhere or kept.checkpoint is not None):
                usable = end
            elif place is None:
                continue
            elif self._cut_anywhere or place.has_state:
                # With what is missing before it; of one that is kept only the state is.
                wanted = keys[min(in_memory, len(keys) - 1) :]
                best, best_bytes = end, bytes_ + place.bytes
            bytes_ += 0 if is_kept or place is None else place.bytes
        return Plan(wanted, best_bytes, best - usable) if best > usable else NOTHING

    def _known(self, tokens: np.ndarray, salt: bytes) -> Iterator[tuple[bytes, int]]:
        """The blocks with which a prompt begins, in memory or on disk, and where each ends in it. The last one may be
        short, or go on beyond the prompt."""
        keys = block_keys(tokens.tolist(), salt)
        before, end = salt, 0
        for key in keys:
            if self._find(key) is None and self._place(key) is None:
                break
            before, end = key, end + BLOCK_TOKENS
            yield key, end
        following = self._directory.following(before) | self._unwritten.following(before)
        for count in sorted(set(following.values()), reverse=True):
            key = chained(before, tokens[end : end + count].tolist())
            if end + count <= len(tokens) and key in following:
                yield key, end + count
                return
        # Of the only one that goes on from here it is not known yet whether it begins like the rest of the prompt.
        if self._cut_anywhere and len(following) == 1 and len(tokens) - end >= PREFIX_TOKENS_MIN:
            yield next(iter(following)), len(tokens)


def _mixed(rate: float, bytes_: int, seconds: float) -> float:
    if bytes_ < _MEASURED_BYTES_MIN:
        return rate
    found = bytes_ / max(seconds, 1e-9)
    return found if not rate else _RATE_KEPT * rate + (1 - _RATE_KEPT) * found
