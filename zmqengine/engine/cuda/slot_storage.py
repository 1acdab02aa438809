"""Arrays of slots on CUDA, written in place by a kernel: MLX would copy an array that a step in flight reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.resident import WORDS, resident
from zmqengine.engine.kv.slots import ColumnWrite, MlxStorage

_THREADS = 256
_COLUMNS = 64
_PIECE_BYTES = 16


class CudaStorage(MlxStorage):
    """`SlotStorage` whose writes MLX does not know of; see `zmqengine.engine.kv`."""

    writes_in_place = True

    def write(self, writes: Sequence[ColumnWrite]) -> None:
        """See `SlotStorage`. A kernel for each array, on the default stream."""
        done = []
        for write in writes:
            count = write.columns.shape[2]
            if not count:
                continue
            _, heads, _, dim = write.array.shape
            done += _write_columns(write.array.dtype, dim)(
                inputs=[write.array, write.columns, resident([write.index, write.start, count])],
                grid=(heads * _THREADS, -(-count // _COLUMNS), 1),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(WORDS,)],
            )
        mx.async_eval(done)  # type: ignore[no-untyped-call]


def supports(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernel writes columns of this type and these dimensions."""
    return dim * dtype.size % _PIECE_BYTES == 0


@cache
def _write_columns(dtype: mx.Dtype, dim: int) -> Variant:
    kernel = Kernel(
        name="write_columns",
        input_names=["array", "columns", "place"],
        output_names=["done"],
        source=kernel_text("write_columns.cu"),
        # Slots have more columns than are written.
        ensure_row_contiguous=False,
    )
    template = [("T", dtype), ("D", dim), ("THREADS", _THREADS)]
    return kernel.variant(template, [dtype] * 2 + [mx.int32], [mx.int32])
