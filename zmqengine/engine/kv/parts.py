"""Short rows that leave a batch in the same step: copied out of it at once, and not each out of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.layout import Layout

# A part is held twice for a moment: as a whole and as the blocks that are cut out of it.
_TOKENS_MAX = 2048


class Part:
    """Rows of a batch without gaps that are copied together, good for one step."""

    def __init__(self, rows: Sequence[int], layout: Layout) -> None:
        self._rows = list(rows)
        self._layout = layout
        self._columns = max(layout.lengths[row] for row in rows)
        self._stacks: dict[tuple[int, str], mx.array] = {}

    def cut(
        self, caches: Sequence[Any], names: Sequence[tuple[int, str]], row: int, start: int, end: int
    ) -> mx.array:
        """Tokens `start` to `end` of one of the rows, in arrays of one shape: (arrays, 1, heads, tokens, width).

        `names`: (place in `caches`, attribute) of each array. Copy the result: it holds what all rows share.
        """
        if names[0] not in self._stacks:
            self._stacks[names[0]] = self._copy(caches, names)
        shift = self._columns - self._layout.lengths[row]
        place = self._rows.index(row)
        return self._stacks[names[0]][:, place : place + 1, :, shift + start : shift + end]

    def _copy(self, caches: Sequence[Any], names: Sequence[tuple[int, str]]) -> mx.array:
        first, last = self._rows[0], self._rows[-1]
        chosen: Any = slice(first, last + 1)
        if last - first >= len(self._rows):
            chosen = self._layout.kernels.small(self._rows)
        stop = self._layout.columns
        whole = mx.concatenate(
            [
                getattr(caches[place], name)[..., stop - self._columns : stop, :][chosen]
                for place, name in names
            ]
        )
        return whole.reshape(len(names), len(self._rows), *whole.shape[1:])


def parts_of(places: Sequence[int], layout: Layout) -> dict[int, Part | None]:
    """The part of each row at `places`, in ascending order; None for one that is better copied alone."""
    groups: list[list[int]] = []
    longest = 0
    for place in places:
        longest = max(longest, layout.lengths[place])
        if not groups or longest * (len(groups[-1]) + 1) > _TOKENS_MAX:
            groups.append([])
            longest = layout.lengths[place]
        groups[-1].append(place)
    found: dict[int, Part | None] = {}
    for group in groups:
        part = Part(group, layout) if len(group) > 1 and layout.gaps is None else None
        found |= dict.fromkeys(group, part)
    return found
