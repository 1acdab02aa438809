"""Grouped copies of short rows that leave a batch in the same step, instead of a copy for each row and layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from zmqengine.engine.kv.layout import Layout

# Maximum tokens of a group: its copy and the blocks cut out of it exist at once.
_TOKENS_MAX = 2048


class RowGroup:
    """Rows of a batch without gaps that are copied together; valid for one step."""

    def __init__(self, rows: Sequence[int], layout: Layout) -> None:
        self._rows = list(rows)
        self._layout = layout
        longest = max(layout.lengths[row] for row in rows)
        self._columns = min(layout.columns, layout.kernels.copied_columns(longest))
        self._stacks: dict[tuple[int, str], mx.array] = {}

    def cut(
        self, caches: Sequence[Any], names: Sequence[tuple[int, str]], row: int, start: int, end: int
    ) -> mx.array:
        """Tokens `start` to `end` of one of the rows, in arrays of one shape: (arrays, 1, heads, tokens, width).

        `names`: (index in `caches`, attribute) of each array. The result is a view of the group's copy, to be copied.
        """
        if names[0] not in self._stacks:
            self._stacks[names[0]] = self._copy(caches, names)
        shift = self._columns - self._layout.lengths[row]
        index = self._rows.index(row)
        return self._stacks[names[0]][:, index : index + 1, :, shift + start : shift + end]

    def _copy(self, caches: Sequence[Any], names: Sequence[tuple[int, str]]) -> mx.array:
        first, last = self._rows[0], self._rows[-1]
        chosen: Any = slice(first, last + 1)
        if last - first >= len(self._rows):
            chosen = self._layout.kernels.small(self._rows)
        stop = self._layout.columns
        whole = mx.concatenate(
            [
                getattr(caches[index], name)[..., stop - self._columns : stop, :][chosen]
                for index, name in names
            ]
        )
        return whole.reshape(len(names), len(self._rows), *whole.shape[1:])


def group_rows(indices: Sequence[int], layout: Layout) -> dict[int, RowGroup | None]:
    """The group of each row at ascending `indices`; None for a row that is copied alone."""
    groups: list[list[int]] = []
    longest = 0
    for index in indices:
        longest = max(longest, layout.lengths[index])
        if not groups or longest * (len(groups[-1]) + 1) > _TOKENS_MAX:
            groups.append([])
            longest = layout.lengths[index]
        groups[-1].append(index)
    found: dict[int, RowGroup | None] = {}
    for group in groups:
        part = RowGroup(group, layout) if len(group) > 1 and layout.gaps is None else None
        found |= dict.fromkeys(group, part)
    return found
