"""What a window is told by the device, on CUDA, that is started before the step on its way is read by the host.

Each of these is one kernel in place of some ten calls, each of which would wait for small arrays to come out of the
host's memory: what they give is `resident`, in buffers of a size that nothing of the host's has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import WORDS

_THREADS = 128


def following_window(
    chosen: mx.array, drafted: mx.array | None, places: Sequence[int] | None, table: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The inputs of the next window [rows, its width], its drafts [rows, its width - 1], and how many tokens the step
    on its way makes of each row [rows].

    That step has `chosen` [its rows, its width], where it had `drafted` [its rows, its width - 1]; `places` are where
    the rows stand in it, if they are not all. What may follow the known tokens of a row is in the `table`
    [rows, both widths - 1], -1 where nothing is known.
    """
    rows = table.shape[0]
    width = table.shape[1] - chosen.shape[1] + 1
    inputs, following, counts = _following_window()(
        # What is not used has to be something.
        inputs=[
            chosen,
            table if drafted is None else drafted,
            table if places is None else mx.array(list(places), dtype=mx.int32),
            table,
        ],
        template=[("LEFT", places is not None)],
        grid=(-(-rows // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(max(WORDS, rows * width),)] * 3,
        output_dtypes=[mx.uint32, mx.int32, mx.int32],
    )
    return (
        inputs[: rows * width].reshape(rows, width),
        following[: rows * (width - 1)].reshape(rows, width - 1),
        counts[:rows],
    )


def standing_after(
    offset: mx.array, kept: mx.array, marks: mx.array, stop: int, width: int, added: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Where rows stand that stood at `offset` [rows] after a window of this `width`, whose columns end at `stop`, once
    they keep just so many of its tokens [rows]; and where after so many are `added`; and `marks` [rows, columns], with
    the columns that they do not keep."""
    rows = marks.shape[0]
    before, after, hidden = _standing_after()(
        inputs=[offset, kept, marks, mx.array([stop, width]), mx.array([added])],
        grid=(rows * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(max(WORDS, rows),)] * 2 + [marks.shape],
        output_dtypes=[mx.int32, mx.int32, mx.uint8],
    )
    return before[:rows], after[:rows], hidden


@cache
def _following_window() -> Any:
    return mx.fast.cuda_kernel(
        name="following_window",
        input_names=["chosen", "drafted", "places", "table"],
        output_names=["inputs", "next_drafted", "counts"],
        source=kernel_text("following_window.cu"),
    )


@cache
def _standing_after() -> Any:
    return mx.fast.cuda_kernel(
        name="standing_after",
        input_names=["offset", "kept", "marks", "window", "added"],
        output_names=["offset_before", "offset_after", "hidden"],
        source=kernel_text("standing_after.cu"),
    )
