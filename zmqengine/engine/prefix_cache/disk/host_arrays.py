"""Arrays of MLX as bytes of the host, and back. For the actor alone, as all that touches MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from zmqengine.engine.prefix_cache.disk.host_block import HostArray

# NumPy has no bfloat16: its bytes go as those of another type.
_BFLOAT16 = "bfloat16"


def to_host(array: Any) -> HostArray:
    """A copy. Waits until the array is computed, if it is not yet, and launches nothing."""
    name = str(array.dtype).removeprefix("mlx.core.")
    return HostArray(name, tuple(array.shape), memoryview(array).tobytes())


def from_host(array: HostArray) -> Any:
    """A copy as well: the bytes may go."""
    is_bfloat16 = array.dtype == _BFLOAT16
    kind = np.dtype("uint16" if is_bfloat16 else array.dtype)
    numbers = np.frombuffer(array.data, kind) if len(array.data) else np.zeros(0, kind)
    made = mx.array(numbers.reshape(array.shape))
    return made.view(mx.bfloat16) if is_bfloat16 else made
