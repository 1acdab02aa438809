"""Which columns of a batch's cache each row sees, without a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Spans:
    """Row i sees the columns from `starts[i]` on, up to the one of the token itself; the newest token of each row
    stands in column `columns` - 1; `stop` is [`columns`], for the device. Columns that `hidden` [rows, columns] marks
    are left out; None marks none.

    `as_mask` makes the mask that says the same: [rows, 1, new columns, columns].
    """

    starts: mx.array
    columns: int
    stop: mx.array
    hidden: mx.array | None
    as_mask: Callable[[], mx.array]
