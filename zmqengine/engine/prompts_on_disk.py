"""What the worker knows of the tier on disk, which keeps prompts for this and later workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import numpy as np


class RestorePlan(Protocol):
    """What to read of one prompt, by the keys of its blocks, and how much that takes."""

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
        """What was measured, for people."""
        ...

    def salt(self, scope: str) -> bytes:
        """What the keys of prompts in this scope are chained to."""
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
        """Whoever had blocks restored has made use of them, or will not."""
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
