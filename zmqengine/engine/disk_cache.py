"""The prefix cache on disk, as the worker calls it. `prefix_cache.disk.tier.DiskTier` implements it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np


class RestorePlan(NamedTuple):
    """Keys of the blocks to read from disk, each the parent of the next, their bytes, and the tokens they save."""

    keys: list[bytes]
    bytes: int
    tokens: int


class DiskCache(Protocol):
    """Any thread may call `read`, only the actor the rest. `read` and `close` wait for the disk.

    Blocks returned by `read` are opaque and passed to `restore`.
    """

    @property
    def has_work(self) -> bool:
        """Whether `save` would copy something."""
        ...

    @property
    def description(self) -> dict[str, str]:
        """Directory and speeds in words, for the log."""
        ...

    def salt(self, scope: str) -> bytes:
        """Root of the hash chain for prompts in this scope."""
        ...

    def plan(self, tokens: np.ndarray, salt: bytes) -> RestorePlan | None:
        """The blocks to read for a prompt; None if prefill is as good."""
        ...

    def read(self, plan: RestorePlan, tokens: np.ndarray) -> deque[Any]:
        """Read the blocks of a plan, up to the first that is gone or damaged."""
        ...

    def restore(self, blocks: deque[Any], bytes_max: int, awaited_by: Hashable) -> None:
        """Move about `bytes_max` from the front of `blocks` into memory, held there until `release`.

        Clears `blocks` where memory has no room for the rest."""
        ...

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks that were restored for a request."""
        ...

    def save(self, bytes_max: int) -> int:
        """Copy about `bytes_max` of blocks that are not on disk to the writer; returns the bytes copied."""
        ...

    def note_prefill(self, tokens_per_s: float) -> None:
        """Note the speed of prefill. Blocks whose restore takes longer than their prefill are neither written nor
        read."""
        ...

    def numbers(self) -> Mapping[str, int]:
        """Figures for `status`."""
        ...

    def close(self, seconds: float = 0.0, goes_on: Callable[[], bool] = ...) -> None:
        """Save the remaining blocks while `goes_on`, for at most `seconds`, and stop writing."""
        ...
