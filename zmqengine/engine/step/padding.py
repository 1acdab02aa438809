"""Padding: bytes of caches that a batch takes because every row is as long as the longest one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zmqengine.engine.row import Row


def padding_bytes(rows: Sequence[Row], project_bytes: Callable[[int], int]) -> int:
    """Bytes that the caches of `rows` take more in one batch than apart; `project_bytes` gives those of one row.

    Padding does not grow as rows decode, since all grow alike.
    """
    padded = project_bytes(longest(rows))
    return sum(padded - project_bytes(_length(row)) for row in rows)


def longest(rows: Sequence[Row]) -> int:
    """Tokens of the longest row, 0 without rows."""
    return max(map(_length, rows), default=0)


def split_by_padding(
    rows: Sequence[Row], project_bytes: Callable[[int], int], bytes_max: int
) -> Iterator[list[Row]]:
    """Split rows into as few parts as at most `bytes_max` of padding in all allows, the shortest rows first."""
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
    # Before its first step a row has all of its prompt but the last token in its cache, or is about to.
    return max(row.computed_tokens, row.prefill_tokens - 1)
