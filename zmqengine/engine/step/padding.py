"""Padding: bytes that rows take because their batch is as long as its longest row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zmqengine.engine.row import Row


def padding_bytes(rows: Sequence[Row], project_bytes: Callable[[int], int]) -> int:
    """What the caches of `rows` take more in one batch than each in its own; `project_bytes` says what those take.

    It does not grow with the rows, which all grow by the same.
    """
    longest = project_bytes(max(map(_length, rows), default=0))
    return sum(longest - project_bytes(_length(row)) for row in rows)


def split_by_padding(
    rows: Sequence[Row], project_bytes: Callable[[int], int], bytes_max: int
) -> Iterator[list[Row]]:
    """`rows` in as few parts as `bytes_max` of padding in all of them allows, taking the shortest first."""
    part: list[Row] = []
    taken = 0
    for row in sorted(rows, key=_length):
        padding = padding_bytes([*part, row], project_bytes)
        if part and taken + padding > bytes_max:
            yield part
            taken += padding_bytes(part, project_bytes)
            part = []
        part.append(row)
    if part:
        yield part


def _length(row: Row) -> int:
    # Before its first step a row holds all it has to read but the last token, or is about to.
    return max(row.held, row.read_tokens - 1)
