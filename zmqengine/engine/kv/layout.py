"""The layout of a batch: which columns hold the tokens of each row, the same in all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.kv import generations
from zmqengine.engine.kv.generations import Generations
from zmqengine.engine.kv.kernels import KVKernels
from zmqengine.engine.models.mlx_lm import create_causal_mask

# Masked slots are read by every step. They are closed when they are more than this, and a part of the columns.
_GAP_COLUMNS_MAX = 64
_GAP_SHARE_MAX = 0.25
# An idle device starts on this many layers at a time.
_EARLY_LAYERS = 4


@dataclass(frozen=True)
class Spans:
    """The columns that each row attends to, for a kernel that needs no mask.

    Row i sees columns `starts[i]` up to that of the token itself; the newest token of each row is in column
    `columns` - 1, and `stop` is [`columns`] on the device. Columns that `hidden` [rows, columns] marks are left out;
    None marks none. `as_mask` makes the same as a mask, [rows, 1, new columns, columns].
    """

    starts: mx.array
    columns: int
    stop: mx.array
    hidden: mx.array | None
    as_mask: Callable[[], mx.array]


class Gaps:
    """Masked slots: columns that some rows of a batch do not use, `hidden` [rows, columns].

    A row is its columns after the padding that are not hidden, in order. Keys are rotated by their positions before
    they are written, so a masked slot moves nothing: it has only to be left out of every attention mask.
    """

    def __init__(self, hidden: np.ndarray) -> None:
        self.hidden = hidden
        # Device copies of `hidden`, made when a kernel or a mask asks for them.
        self._marks: mx.array | None = None
        self._visible: mx.array | None = None

    def hide(self, stop: int, counts: Sequence[int]) -> None:
        """Mask the last `counts[i]` columns of row i before `stop`; columns from `stop` on are unmasked."""
        self._widen(stop)
        self.hidden[:, stop:] = False
        for row, count in enumerate(counts):
            self.hidden[row, stop - count : stop] = True
        self._marks = self._visible = None

    def visible(self, columns: int) -> mx.array:
        """Visible slots of the first `columns`, as a mask [rows, 1, 1, columns]."""
        if self._visible is None or self._visible.shape[3] < columns:
            self._visible = (self.marks(columns) == 0)[:, None, None]
        return self._visible[..., :columns]

    def marks(self, columns: int) -> mx.array:
        """`hidden` as a device array, [rows, columns or more], for the ragged-attention kernel."""
        self._widen(columns)
        if self._marks is None:
            self._marks = mx.array(self.hidden.view(np.uint8))
        elif self._marks.shape[1] < columns:
            missing = self.hidden.shape[1] - self._marks.shape[1]
            self._marks = mx.pad(self._marks, [(0, 0), (0, missing)])
        return self._marks

    def _widen(self, columns: int) -> None:
        missing = columns - self.hidden.shape[1]
        if missing > 0:
            more = -(-missing // _GAP_COLUMNS_MAX) * _GAP_COLUMNS_MAX
            self.hidden = np.pad(self.hidden, ((0, 0), (0, more)))


class Layout:
    """Columns of the rows of a batch, in every layer that keeps all tokens.

    `lengths`: cached tokens of each row, those of the step that was begun last included. Rows end in the last of
    `columns`; a row's tokens are its last columns after `padding` that are not in `gaps`. Device copies: `offset`
    (`lengths`) and `left_padding` (`padding`), [rows].

    A step adds columns `start` to `columns`. While the model runs, some layers have written theirs and others have not:
    each knows by `step`, the number of the step, and reads `offset` or `offset_before`.
    """

    def __init__(self, kernels: KVKernels, lengths: Sequence[int]) -> None:
        self.kernels = kernels
        self.gaps: Gaps | None = None
        self.step = 0
        self.generations = Generations() if generations.CHECKS else None
        self.set_rows(lengths)

    def set_rows(
        self,
        lengths: Sequence[int],
        columns: int | None = None,
        padding: Sequence[int] | None = None,
        gaps: Gaps | None = None,
    ) -> None:
        """Set the columns of all rows; by default right-justified, the longest from the first column on."""
        self.columns = self.start = max(lengths, default=0) if columns is None else columns
        self.lengths = list(lengths)
        self.padding = [self.columns - length for length in lengths] if padding is None else list(padding)
        self.gaps = gaps
        self.is_level = False
        self.is_early = False
        self.offset = self.offset_before = self.kernels.small(self.lengths)
        self.left_padding = self.kernels.small(self.padding)

    @property
    def width(self) -> int:
        """Columns of the step that was begun last; 0 when it was rolled back or rows have changed."""
        return self.columns - self.start

    def begin_step(self, width: int, *, idle: bool) -> None:
        """Add `width` columns. While the device is `idle`, it starts early on the first layers."""
        self.is_level = self.gaps is None and min(self.lengths) == self.columns
        self.is_early = idle
        self.start = self.columns
        self.columns += width
        self.lengths = [length + width for length in self.lengths]
        self.offset_before, self.offset = self.offset, self.kernels.small(self.offset + width)
        self.step += 1

    def is_early_layer(self, number: int) -> bool:
        """Whether the device should start on the step as far as layer `number`, while the host builds the next ones."""
        return self.is_early and number % _EARLY_LAYERS == 1

    def roll_back(self, counts: Sequence[int]) -> None:
        """Drop the last `counts[i]` tokens of row i: columns dropped by all rows are free again, the others become
        masked slots."""
        common = min(counts)
        stop, gaps = self.columns - common, self.gaps
        if gaps is None and max(counts) > common:
            gaps = Gaps(np.zeros((len(counts), self.with_room(self.columns)), np.bool_))
        if gaps is not None:
            gaps.hide(stop, [count - common for count in counts])
        self.lengths = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        self.gaps = gaps
        self.columns = self.start = stop
        self.offset = self.offset_before = self.kernels.small(self.lengths)

    def keep_rows(self, indices: Sequence[int]) -> None:
        """Make row i the one that was at `indices[i]`, in unchanged columns."""
        self.set_rows(
            [self.lengths[index] for index in indices],
            self.columns,
            [self.padding[index] for index in indices],
            None if self.gaps is None else Gaps(self.gaps.hidden[list(indices)]),
        )

    def join(self, other: Layout) -> None:
        """Add the rows of `other`, which has no gaps, right-justified in the columns of the larger of both."""
        columns = max(self.columns, other.columns)
        padding = [padding + columns - each.columns for each in (self, other) for padding in each.padding]
        gaps = self.gaps
        if gaps is not None:
            gaps = Gaps(np.pad(gaps.hidden, ((0, len(other.lengths)), (0, 0))))
        self.set_rows([*self.lengths, *other.lengths], columns, padding, gaps)

    def must_close(self, width: int, room: int) -> bool:
        """Whether gaps should be closed before a step of `width`, in arrays that have `room` columns.

        A full cache is copied anyway; that copy also drops columns that only rows now gone had used.
        """
        spare = self.columns - max(self.lengths)
        is_full = self.columns + width > room
        if self.gaps is None:
            return is_full and spare > 0
        return is_full or spare > max(_GAP_COLUMNS_MAX, self.columns * _GAP_SHARE_MAX)

    def columns_of(self, index: int) -> np.ndarray:
        """The columns that hold the tokens of one row, in order."""
        length = self.lengths[index]
        if self.gaps is None:
            return np.arange(self.columns - length, self.columns, dtype=np.uint32)
        hidden = self.gaps.hidden
        used = np.flatnonzero(~hidden[index, : self.columns])
        if self.columns > hidden.shape[1]:
            used = np.concatenate([used, np.arange(hidden.shape[1], self.columns)])
        return used[len(used) - length :].astype(np.uint32)

    def with_room(self, columns: int) -> int:
        """Columns to allocate for `columns` and the next token, so that the batch is not copied again at once."""
        growth = self.kernels.growth
        return (columns // growth + 1) * growth

    def mask(self, **options: Any) -> mx.array:
        """The attention mask of the step, [rows, 1, width, columns], with mlx-lm's `options`."""
        mask: mx.array = create_causal_mask(
            self.width, offset=self.start, left_padding=self.left_padding, **options
        )
        return mask if self.gaps is None else mask & self.gaps.visible(self.columns)

    def spans(self) -> Spans:
        """The columns that each row sees in the step."""
        marks = None if self.gaps is None else self.gaps.marks(self.columns)
        width, start, columns, padding, gaps = (
            self.width,
            self.start,
            self.columns,
            self.left_padding,
            self.gaps,
        )

        def as_mask() -> mx.array:
            mask: mx.array = create_causal_mask(width, offset=start, left_padding=padding)
            return mask if gaps is None else mask & gaps.visible(columns)

        return Spans(padding, columns, self.kernels.small([columns]), marks, as_mask)

    def wrote_in_place(self) -> None:
        """Note that the columns of the step were written in place, and that it is not started yet."""
        if self.generations is not None:
            rows = range(len(self.lengths))
            self.generations.wrote(rows, self.start, self.columns)
            for row in rows:
                self.generations.built(generations.STEP, row, self.columns_of(row))

    def replaced(self) -> None:
        """Note that the layers have new arrays."""
        if self.generations is not None:
            self.generations.replaced()
