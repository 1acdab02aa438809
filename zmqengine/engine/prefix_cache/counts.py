"""Counters of the prefix cache since it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from zmqengine.engine.prefix_cache.index import Node


class Counts:
    """`refused` are prompts that were not kept, by reason; `divergences` those that turned off a kept one late."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.divergences = 0
        self._restored_tokens = 0
        self._hit_tokens = {"memory": 0, "disk": 0}

    def restored(self, nodes: Sequence[Node], known: Collection[bytes]) -> None:
        """These blocks have come from a slower tier, but for those whose keys were `known`."""
        for node in nodes:
            if node.block.key not in known:
                node.is_restored = True
                self._restored_tokens += len(node.block.tokens)

    def hit(self, nodes: Sequence[Node], length: int) -> None:
        """A row got the first `length` tokens of these blocks."""
        for node in nodes:
            tokens = min(node.block.end, length) - node.block.start
            self._hit_tokens["disk" if node.is_restored else "memory"] += tokens
            # The next row finds it in memory.
            node.is_restored = False

    def numbers(self) -> dict[str, int]:
        """For `status`."""
        return {
            **{f"{tier}_hit_tokens": tokens for tier, tokens in self._hit_tokens.items()},
            "restored_tokens": self._restored_tokens,
            "divergences": self.divergences,
            **{f"refused_{reason.replace(' ', '_')}": count for reason, count in self.refused.items()},
        }
