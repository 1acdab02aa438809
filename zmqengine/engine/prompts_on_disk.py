"""The worker's view of the prefix cache on disk, which keeps prompts for this and later workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import numpy as np


class RestorePlan(Protocol):
    """A plan to read blocks of one prompt, by key, and its cost."""

    @property
    def keys(self) -> list[bytes]: ...

    @property
    def bytes(self) -> int: ...


class PromptsOnDisk(Protocol):
    """`plan` and `read` may be called by any thread, all else by the actor; nothing waits for the disk but `read`,
    `measure` and `close`. What `plan` gives is for `read`, and what `read` gives for `restore`: nobody looks inside.
    """

    @property
    def has_work(self) -> bool:
        """Whether `save` would do something."""
        ...

    @property
    def told(self) -> dict[str, str]:
        """Measured speeds in words."""
        ...

    def salt(self, scope: str) -> bytes:
        """Root of the hash chain for prompts in this scope."""
        ...

    def plan(self, tokens: np.ndarray, salt: bytes) -> RestorePlan:
        """Which blocks to read for a prompt."""
        ...

    def read(self, plan: Any, tokens: np.ndarray) -> deque[Any]:
        """Read them. What is gone or damaged is left out, and what follows it."""
        ...

    def restore(self, blocks: deque[Any], bytes_max: int, awaited_by: Hashable) -> None:
        """Put the first of `blocks` into memory, about so many bytes, and take them off. There they stay until
        `release`, as long as nothing else needs the room."""
        ...

    def release(self, awaited_by: Hashable) -> None:
        """Release the blocks that were restored for a request, used or not."""
        ...

    def save(self, bytes_max: int) -> int:
        """Copy about so many bytes of what is not on disk yet for the thread that writes; returns how many."""
        ...

    def note_reading(self, tokens_per_s: float) -> None:
        """How fast the model reads prompts. What would come back slower is neither restored nor written."""
        ...

    def measure(self) -> None:
        """Find out how fast blocks come back, if there are any."""
        ...

    def numbers(self) -> Mapping[str, int]:
        """For `status`."""
        ...

    def close(self, seconds: float = 0.0, goes_on: Callable[[], bool] = ...) -> None:
        """Write what is left while `goes_on` and for so many seconds at the most; then no more."""
        ...
