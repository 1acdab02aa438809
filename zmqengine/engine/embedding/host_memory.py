"""Memory that the host and the device share: the tables of a batch and its vectors, in place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from zmqengine.checkpoint.encoder_batch import TOKENS_MAX_GPU
from zmqengine.engine.host.device_memory import share_in_place

TABLES_SIZE = 7 * TOKENS_MAX_GPU
"""Numbers in the tables of a batch: five of each token, and two of each text, which has a token at least."""
VECTORS_SIZE = 256 * 1024
"""Numbers in the vectors of a batch: 256 texts, as a message has at most, of a width of 1,024."""

Shapes = tuple[tuple[int, ...], ...]


class User(Protocol):
    """A batch in this memory."""

    def result(self) -> object:
        """The batch's vectors in memory of their own, once they are computed."""
        ...


class HostMemory:
    """The tables and the vectors of a batch, in the same memory batch after batch.

    On CUDA, MLX has arrays that the host writes or reads in managed memory: their pages move to the device by faults of
    the first kernel that reads or writes them, for 100 us, and back by faults of the host. The pages here stay with the
    host.
    """

    def __init__(self) -> None:
        self._memory = mx.array(np.zeros(TABLES_SIZE, np.int32))
        self._numbers = np.asarray(self._memory)
        self.vectors = mx.array(np.zeros(VECTORS_SIZE, np.float32))
        """The memory of vectors, for a kernel that writes into it."""
        self._floats = np.asarray(self.vectors)
        for shared in (self._numbers, self._floats):
            share_in_place(shared)
        self._views: dict[Shapes, list[mx.array]] = {}
        self.user: User | None = None
        """The batch that uses this memory, set by the caller: its result is fetched before the next has the memory."""

    def fill(self, tables: Sequence[np.ndarray]) -> list[mx.array]:
        """`tables` of int32 as arrays, which the next call overwrites, and the vectors' memory is free."""
        user, self.user = self.user, None
        if user is not None:
            # The caller of `result` for that batch gets the error.
            with contextlib.suppress(Exception):
                user.result()
        if sum(table.size for table in tables) > TABLES_SIZE:
            return [mx.array(table) for table in tables]
        shapes = tuple(table.shape for table in tables)
        if shapes not in self._views:
            self._views[shapes] = self._viewed(shapes)
        end = 0
        for table in tables:
            begin, end = end, end + table.size
            self._numbers[begin:end] = table.ravel()
        return self._views[shapes]

    def read(self, count: int, width: int) -> np.ndarray:
        """The first `count` vectors of `width` numbers, copied."""
        return np.array(self._floats[: count * width]).reshape(count, width)

    def _viewed(self, shapes: Shapes) -> list[mx.array]:
        views, end = [], 0
        for shape in shapes:
            begin, end = end, end + int(np.prod(shape))
            views.append(self._memory[begin:end].reshape(shape))
        mx.eval(views)
        return views
