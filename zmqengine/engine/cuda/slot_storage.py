"""Arrays of slots on CUDA, written in place by a kernel: MLX would copy an array that a step in flight reads.

A launch takes the arrays of many layers: the host spends tens of microseconds on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Variant
from zmqengine.engine.cuda.kernel_text import for_each, kernel_text
from zmqengine.engine.cuda.resident import WORDS, resident
from zmqengine.engine.kv.slots import MlxStorage

ARRAYS_MAX = 64
"""Arrays of a launch, those of 32 layers. Fewer are filled up, so that a model needs one kernel of each kind."""
_THREADS = 256
_COLUMNS = 64
_PIECE_BYTES = 16


class CudaStorage(MlxStorage):
    """`SlotStorage` whose writes MLX does not know of; see `zmqengine.engine.kv`."""

    writes_in_place = True

    def read(self, arrays: Sequence[mx.array], index: int, start: int, end: int) -> mx.array:
        """See `SlotStorage`."""
        _, heads, _, dim = arrays[0].shape
        count = end - start
        place = resident([index, start, count, heads])
        parts = [
            _read_columns(lot[0].dtype, dim)(
                inputs=[*_filled(lot), place],
                grid=(heads * _THREADS, -(-count // _COLUMNS), len(lot)),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(len(lot), 1, heads, count, dim)],
            )[0]
            for _, lot in _lots(arrays)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def write(self, arrays: Sequence[mx.array], index: int, start: int, columns: mx.array) -> None:
        """See `SlotStorage`. On the default stream."""
        _, heads, _, dim = arrays[0].shape
        count = columns.shape[-2]
        if not count:
            return
        place = resident([index, start, count])
        done = [
            _write_columns(lot[0].dtype, dim)(
                inputs=[*_filled(lot), columns[first : first + len(lot)], place],
                grid=(heads * _THREADS, -(-count // _COLUMNS), len(lot)),
                threadgroup=(_THREADS, 1, 1),
                output_shapes=[(WORDS,)],
            )[0]
            for first, lot in _lots(arrays)
        ]
        mx.async_eval(done)  # type: ignore[no-untyped-call]

    def clear(self, arrays: Sequence[mx.array], index: int) -> None:
        """See `SlotStorage`."""
        _, *shape = arrays[0].shape
        zeros = self.zeros((1, 1, *shape), arrays[0].dtype)
        self.write(arrays, index, 0, mx.broadcast_to(zeros, (len(arrays), 1, *shape)))


def supports(dtype: mx.Dtype, dim: int) -> bool:
    """Whether the kernels copy columns of this type and these dimensions."""
    return dim * dtype.size % _PIECE_BYTES == 0


def _lots(arrays: Sequence[mx.array]) -> Iterator[tuple[int, Sequence[mx.array]]]:
    """The arrays of each launch, and the number of the first."""
    for first in range(0, len(arrays), ARRAYS_MAX):
        yield first, arrays[first : first + ARRAYS_MAX]


def _filled(arrays: Sequence[mx.array]) -> list[mx.array]:
    return [*arrays, *[arrays[0]] * (ARRAYS_MAX - len(arrays))]


@cache
def _write_columns(dtype: mx.Dtype, dim: int) -> Variant:
    return _kernel("write_columns", ["columns", "place"], "done").variant(
        _template(dtype, dim), [dtype] * (ARRAYS_MAX + 1) + [mx.int32], [mx.int32]
    )


@cache
def _read_columns(dtype: mx.Dtype, dim: int) -> Variant:
    return _kernel("read_columns", ["place"], "copied").variant(
        _template(dtype, dim), [dtype] * ARRAYS_MAX + [mx.int32], [dtype]
    )


def _kernel(name: str, inputs: Sequence[str], output: str) -> Kernel:
    return Kernel(
        name=name,
        input_names=[*[f"array{number}" for number in range(ARRAYS_MAX)], *inputs],
        output_names=[output],
        source=for_each(kernel_text(f"{name}.cu"), ARRAYS_MAX),
        # Slots have more columns than are written.
        ensure_row_contiguous=False,
    )


def _template(dtype: mx.Dtype, dim: int) -> list[tuple[str, object]]:
    return [("T", dtype), ("D", dim), ("THREADS", _THREADS)]
