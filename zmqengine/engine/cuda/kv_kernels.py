"""`KVKernels` on CUDA: rows of a batch are moved in place, without a copy of all the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx

from zmqengine.engine.cuda.kernel import Kernel, Template, Variant
from zmqengine.engine.cuda.kernel_text import kernel_text
from zmqengine.engine.cuda.packed_attention import SEGMENTS
from zmqengine.engine.cuda.resident import WORDS, resident, zeros
from zmqengine.engine.kv import RowKVCache
from zmqengine.engine.kv.kernels import KeysValues, Move, PlainKernels
from zmqengine.engine.models.decoder_weights import HeadShape

log = logging.getLogger("zmqengine.engine")

_THREADS = 256
_COLUMNS = 64
_PIECE_BYTES = 16
_SHARED_BYTES_MAX = 1 << 14
# Share of the memory limit that a batch may leave empty in any case. Without it, 8 chats on an H100 copied their batch
# of 3 GB nine times a second.
_EMPTY_SHARE = 1 / 32


class CudaKernels(PlainKernels):
    """`KVKernels` with small arrays in device memory, and rows moved in place."""

    # Beside them two batches in decode share the kernels of a packed step.
    prompts_apart = SEGMENTS - 2

    def __init__(self) -> None:
        super().__init__(gpu=True)
        self.empty_bytes_max = int(mx.get_memory_limit() * _EMPTY_SHARE)

    def small(self, values: Sequence[int] | mx.array) -> mx.array:
        """These numbers as int32, in a buffer of the device."""
        return resident(values)

    def can_move_rows(self, keys: mx.array) -> bool:
        """Whether the kernel supports these keys, and works on this device."""
        rows, _, _, dim = keys.shape
        # MLX returns a slice without a copy where the array is hardly larger than the slice.
        if dim * keys.itemsize % _PIECE_BYTES or keys.nbytes // rows <= _SHARED_BYTES_MAX:
            return False
        return _works(keys.dtype, dim)

    def move_rows(
        self, layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
    ) -> None:
        """Start the kernel on each layer, on the default stream."""
        mx.async_eval(move_rows(layers, sources, moves))  # type: ignore[no-untyped-call]

    def repack(self, layer: KeysValues, order: mx.array, rows: int) -> KeysValues:
        """See `KVKernels`. MLX's own gather takes 25 times as long as its memory traffic."""
        keys, values = layer
        _, heads, _, dim = keys.shape
        shape = (rows, heads, order.shape[1], dim)
        new_keys, new_values = _repack_rows(keys.dtype, dim)(
            inputs=[keys, values, order],
            grid=(order.shape[0] * 2 * heads * _THREADS, -(-order.shape[1] // _COLUMNS), 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[shape, shape],
        )
        return new_keys, new_values

    def free(self, layers: list[KeysValues]) -> None:
        """See `KVKernels`. Their memory goes back to CUDA's pool, and not to MLX's freed buffers.

        MLX keeps those for arrays of the same size, which a batch hardly has twice, up to a bound, which one batch may
        exceed. At the bound MLX releases the small buffers of each step and allocates them anew: at 64 chats on an H200
        200 of them in a step with prompts, and two waits for the device.
        """
        if layers:
            bound = mx.set_cache_limit(0)
            layers.clear()
            mx.set_cache_limit(bound)


@cache
def _works(dtype: mx.Dtype, dim: int) -> bool:
    """Try the kernels on arrays of their own; returns whether they moved a row."""
    keys = mx.arange(4 * dim).reshape(2, 1, 2, dim).astype(dtype)
    try:
        # Rows and columns in the other order, and a row to spare.
        layer = CudaKernels().repack((keys, keys + 1), mx.array([[3, 2], [1, 0]], dtype=mx.int32), 3)
        mx.eval(layer, move_rows([layer], [layer], [Move(0, 2, 0, 0, 2)]))
    except RuntimeError as error:
        log.warning(
            "the kernels that move rows do not work here: batches are copied when rows join or leave",
            extra={"reason": str(error)},
        )
        return False
    wanted = mx.flatten(keys, 0, 2)[::-1].reshape(2, 1, 2, dim)[mx.array([0, 1, 0])]
    return all(bool(mx.array_equal(array, wanted + more)) for more, array in enumerate(layer))


def move_rows(
    layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
) -> list[mx.array]:
    """Build the kernel that moves rows of each layer; the rows have moved once the result is computed.

    MLX does not know that `layers` change: reads and writes of those rows must be started before or after it, on the
    same stream.
    """
    table = resident([number for move in moves for number in move])
    longest = max(move.columns for move in moves)
    return [
        _move_rows(keys.dtype, keys.shape[-1])(
            inputs=[keys, values, *source, table],
            grid=(len(moves) * 2 * keys.shape[1] * _THREADS, -(-longest // _COLUMNS), 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(WORDS,)],
        )[0]
        for (keys, values), source in zip(layers, sources, strict=True)
    ]


def make_room(layers: Sequence[tuple[HeadShape, RowKVCache]], width: int) -> None:
    """Give the caches of a row, one for each of `layers`, arrays of their own with room for its prompt, or at least for
    `width` more columns.

    Their memory is allocated by one kernel for all layers, and not initialised.
    """
    alike: dict[tuple[mx.Dtype, tuple[int, ...], int], list[RowKVCache]] = {}
    for heads, one in layers:
        if one.keys is None or one.keys.dtype == heads.dtype:
            wanted = max(one.offset + width, one.room_wanted)
            shape: tuple[int, ...] = (1, heads.key_heads, -(-wanted // one.step) * one.step, heads.dim)
            alike.setdefault((heads.dtype, shape, one.offset), []).append(one)
    for (dtype, shape, length), caches in alike.items():
        count = 2 * len(caches)
        arrays = _new_arrays(dtype, count)(
            inputs=[zeros()], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[shape] * count
        )
        made: list[KeysValues] = list(zip(arrays[::2], arrays[1::2], strict=True))
        if length:
            known = [(one.keys, one.values) for one in caches]
            moved = move_rows(made, known, [Move(0, 0, 0, 0, length)])
            made = [tuple(mx.depends(list(pair), [done])) for pair, done in zip(made, moved, strict=True)]
        for one, pair in zip(caches, made, strict=True):
            one.own(*pair)


@lru_cache(maxsize=64)
def _new_arrays(dtype: mx.Dtype, count: int) -> Variant:
    kernel = Kernel(
        name="new_arrays",
        input_names=["unused"],
        output_names=[f"array{number}" for number in range(count)],
        source="// Memory that is not initialised.",
    )
    return kernel.variant([("COUNT", count)], [mx.int32], [dtype] * count)


@cache
def _move_rows(dtype: mx.Dtype, dim: int) -> Variant:
    kernel = Kernel(
        name="move_rows",
        input_names=["keys", "values", "from_keys", "from_values", "moves"],
        output_names=["done"],
        source=kernel_text("move_rows.cu"),
        # They may have more columns than are in use.
        ensure_row_contiguous=False,
    )
    return kernel.variant(_template(dtype, dim), [dtype] * 4 + [mx.int32], [mx.int32])


@cache
def _repack_rows(dtype: mx.Dtype, dim: int) -> Variant:
    kernel = Kernel(
        name="repack_rows",
        input_names=["keys", "values", "order"],
        output_names=["new_keys", "new_values"],
        source=kernel_text("repack_rows.cu"),
        ensure_row_contiguous=False,
    )
    return kernel.variant(_template(dtype, dim), [dtype, dtype, mx.int32], [dtype, dtype])


def _template(dtype: mx.Dtype, dim: int) -> Template:
    return [("T", dtype), ("D", dim), ("THREADS", _THREADS)]
