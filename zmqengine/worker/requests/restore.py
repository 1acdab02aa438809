"""Blocks that a request gets from disk before it waits for a row."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from zmqengine.engine.prompts_on_disk import RestorePlan


@dataclass(slots=True, eq=False)
class Restore:
    """First planned, then read on a thread, then made arrays piece by piece: `blocks` are those still to be made."""

    plan: RestorePlan
    tokens: np.ndarray
    blocks: deque[Any] = field(default_factory=deque)
    is_read: bool = False
