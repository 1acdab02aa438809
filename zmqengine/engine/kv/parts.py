"""Short rows that leave a batch in the same step: copied out of it at once, and not each out of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda.resident import resident

# What is copied is held twice for a moment.
_TOKENS_MAX = 2048


class Part:
    """The rows at the places `rows` of a batch, the longest of which holds `columns`. Good for one step."""

    def __init__(self, rows: Sequence[int], columns: int) -> None:
        self.columns = columns
        self._rows = list(rows)
        self._numbers = {row: number for number, row in enumerate(rows)}
        self._stacks: dict[tuple[int, str], mx.array] = {}

    def cut(
        self, caches: Sequence[Any], arrays: Sequence[tuple[int, str]], row: int, begin: int, end: int
    ) -> mx.array:
        """Columns from `begin` to `end` of the last `columns`, of one of the rows, in `arrays`, which are (place in
        `caches`, name) of one shape: (arrays, 1, heads, columns, width). Copy it: it holds what all rows share."""
        if arrays[0] not in self._stacks:
            self._stacks[arrays[0]] = self._copy(caches, arrays)
        number = self._numbers[row]
        return self._stacks[arrays[0]][:, number : number + 1, :, begin:end]

    def _copy(self, caches: Sequence[Any], arrays: Sequence[tuple[int, str]]) -> mx.array:
        first, last = self._rows[0], self._rows[-1]
        chosen: Any = slice(first, last + 1)
        if last - first >= len(self._rows):
            chosen = resident(self._rows)
        found = []
        for place, name in arrays:
            cache = caches[place]
            found.append(getattr(cache, name)[..., cache._idx - self.columns : cache._idx, :][chosen])
        whole = mx.concatenate(found)
        return whole.reshape(len(arrays), len(self._rows), *whole.shape[1:])


def parts_of(places: Sequence[int], held: Sequence[int]) -> dict[int, Part | None]:
    """For each of `places`, in ascending order, its part; None for one that is better taken alone.

    `held` is how many tokens each row of the batch holds, those of a window included.
    """
    groups: list[list[int]] = []
    longest = 0
    for place in places:
        longest = max(longest, held[place])
        if not groups or longest * (len(groups[-1]) + 1) > _TOKENS_MAX:
            groups.append([])
            longest = held[place]
        groups[-1].append(place)
    found: dict[int, Part | None] = {}
    for group in groups:
        part = Part(group, max(held[place] for place in group)) if len(group) > 1 else None
        found |= dict.fromkeys(group, part)
    return found
