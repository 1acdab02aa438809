"""Blocks in memory of the host, which any thread may hold: what is written to files and read from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Bytes = bytes | bytearray | memoryview


class HostArray(NamedTuple):
    """An array in memory of the host: its bytes row-major and little-endian, `dtype` as MLX calls it."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class HostBlock(NamedTuple):
    """A `StoredBlock` whose arrays are in memory of the host. `form` is that of its checkpoint, empty without one."""

    key: bytes
    parent_key: bytes
    start: int
    tokens: np.ndarray
    arrays: Sequence[HostArray]
    form: str = ""
    state: Sequence[HostArray] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the block."""
        return self.tokens.nbytes + sum(len(array.data) for array in (*self.arrays, *self.state))
