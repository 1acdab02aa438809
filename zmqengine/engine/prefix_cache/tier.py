"""Interface of the slower tier behind the prefix cache in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqengine.engine.prefix_cache.block import StoredBlock


class Tier(Protocol):
    """Takes what memory has no room for. Called by the actor only, and never waits.

    Blocks come back in the *preparing* phase: read beside the actor, made arrays by it, given to
    `PrefixCache.insert_blocks`.
    """

    def on_add(self, block: StoredBlock) -> None:
        """This block is kept in memory from now on, or its checkpoint is. Its arrays may not be computed yet."""
        ...

    def on_evict(self, blocks: Sequence[StoredBlock]) -> None:
        """These blocks, each the parent of the next, are about to go. Their arrays are computed."""
        ...

    def on_clear(self) -> None:
        """Nothing is in memory any more, and what was there may have been bad."""
        ...

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many tokens of the prompt with these keys it could give back."""
        ...
