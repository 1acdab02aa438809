"""Writes into KV caches in place on a CPU, unknown to MLX, as the kernels for CUDA do."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from zmqengine.engine import kv
from zmqengine.engine.host.backend import on_cuda, on_gpu
from zmqengine.engine.kv.kernels import KeysValues, Move

# Of an array that is hardly larger than a row MLX gives the row itself for a copy of it.
_SHARED_BYTES_MAX = 1 << 14


class MemoryKernels(kv.PlainKernels):
    """`KVKernels` that move rows at once, in memory: what is built and not computed yet reads it afterwards.

    `moves`: "within" for each move among rows of a batch, "into" for rows that join. `unused`: number in memory that
    is not initialised, which attention by a mask multiplies with 0, and our kernels do not read.
    """

    def __init__(self, *, gpu: bool = False, unused: float = 0.0) -> None:
        super().__init__(gpu=gpu)
        self.unused = unused
        self.moves: list[str] = []

    def can_move_rows(self, keys: mx.array) -> bool:
        return keys.nbytes // keys.shape[0] > _SHARED_BYTES_MAX

    def move_rows(
        self, layers: Sequence[KeysValues], sources: Sequence[KeysValues], moves: Sequence[Move]
    ) -> None:
        within = sources is layers
        assert not within or not {move.row for move in moves} & {move.from_row for move in moves}
        self.moves.append("within" if within else "into")
        for whole, source in zip(layers, sources, strict=True):
            for array, given in zip(map(memory, whole), map(memory, source), strict=True):
                for move in moves:
                    columns = given[move.from_row, :, move.from_start : move.from_start + move.columns]
                    array[move.row, :, move.start : move.start + move.columns] = columns

    def repack(self, layer: KeysValues, order: mx.array, rows: int) -> KeysValues:
        keys, values = (memory(array) for array in layer)
        places, columns = np.array(order), keys.shape[2]
        used = places >= 0
        made = []
        for array in (keys, values):
            new = np.full((rows, array.shape[1], places.shape[1], array.shape[3]), self.unused, np.float32)
            by_column = new.transpose(0, 2, 1, 3)
            by_column[: len(places)][used] = array.transpose(0, 2, 1, 3)[
                places[used] // columns, places[used] % columns
            ]
            made.append(mx.array(new).astype(layer[0].dtype))
        return made[0], made[1]


def device_kernels() -> kv.KVKernels:
    """Those of the device that computes, as an engine that is opened has them."""
    if on_cuda():
        from zmqengine.engine.cuda.kv_kernels import CudaKernels

        return CudaKernels()
    return kv.PlainKernels(gpu=on_gpu())


def memory(array: mx.array) -> np.ndarray:
    """The memory of `array`, to be changed without MLX's knowledge."""
    mx.eval(array)
    mx.synchronize()
    return np.array(array, copy=False)


def write_in_place(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have layers of every model write in place where they may; returns whether they did, each time."""
    writes: list[bool] = []
    own = kv.RaggedKVCache.write

    def write(self: kv.RaggedKVCache, keys: mx.array, values: mx.array) -> None:
        writes.append(self.can_write_here(keys.shape[2], keys.dtype))
        if not writes[-1]:
            own(self, keys, values)
            return
        start, stop = self.layout.start, self.layout.columns
        for array, columns in ((self.keys, keys), (self.values, values)):
            memory(array)[..., start:stop, :] = memory(columns)
        self.wrote_in_place(stop - start, keys)

    monkeypatch.setattr(kv.RaggedKVCache, "write", write)
    return writes
