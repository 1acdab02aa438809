"""Tables of batches share memory: the next tables wait for the vectors of the batch before."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from zmqengine.engine.embedding.host_memory import TABLES_SIZE, HostMemory


class User:
    """A batch whose result is an array, or an error."""

    def __init__(self, array: mx.array | None) -> None:
        self.found: object = None
        self._array = array

    def result(self) -> object:
        if self._array is None:
            raise RuntimeError("out of memory")
        self.found = self._array.tolist()
        return self.found


def tables_of(first: int) -> list[np.ndarray]:
    return [np.arange(first, first + 8, dtype=np.int32).reshape(4, 2), np.full((2, 1), first, np.int32)]


def numbers(arrays: list[mx.array]) -> list[object]:
    return [array.tolist() for array in arrays]


def wanted(first: int) -> list[object]:
    return [table.tolist() for table in tables_of(first)]


def test_tables_lie_in_the_same_memory() -> None:
    """So that no page of it is new to the device; those of another form begin there too."""
    memory = HostMemory()
    given = memory.fill(tables_of(1))
    assert numbers(given) == wanted(1)
    assert numbers(memory.fill(tables_of(50))) == wanted(50) == numbers(given)
    assert numbers(memory.fill([np.full((1, 3), 9, np.int32)])) == [[[9, 9, 9]]]
    assert given[0].tolist() == [[9, 9], [9, 53], [54, 55], [56, 57]]


def test_tables_are_overwritten_once_they_are_read() -> None:
    """Even if no caller reads the batch before; an error in it concerns no later batch."""
    memory = HostMemory()
    memory.user = user = User(memory.fill(tables_of(1))[0] * 2)
    memory.fill(tables_of(50))
    assert user.found == (2 * tables_of(1)[0]).tolist()
    memory.user = User(None)
    assert numbers(memory.fill(tables_of(7))) == wanted(7)


def test_tables_that_are_too_large_are_arrays_of_their_own() -> None:
    """The memory is as large as a batch of the most tokens; a longer text is another."""
    memory = HostMemory()
    (given,) = memory.fill([np.full((1, TABLES_SIZE + 1), 3, np.int32)])
    memory.fill(tables_of(50))
    assert given.shape == (1, TABLES_SIZE + 1)
    assert mx.all(given == 3).item()


def test_vectors_are_copied_out_of_the_memory() -> None:
    """They are as they were written, whatever comes there later."""
    memory = HostMemory()
    floats = np.asarray(memory.vectors)
    floats[:6] = range(6)
    found = memory.read(2, 3)
    floats[:6] = 0
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
