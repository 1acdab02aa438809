"""Device buffers for small arrays that every kernel of a step reads.

On CUDA, MLX allocates arrays that the host writes or reads in managed memory, where small arrays share pages: when the
host reads one, all of them migrate. So arrays that a step reads in every layer are copied into a buffer of a size that
no array of the host has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from zmqengine.engine.host.backend import on_cuda

WORDS = 12_288
"""Size of such a buffer in numbers of 4 bytes."""


def resident(values: Sequence[int] | mx.array) -> mx.array:
    """`values` as int32 in a device buffer."""
    array = values if isinstance(values, mx.array) else mx.array(list(values), dtype=mx.int32)
    if not _on_cuda():
        return array
    count = array.shape[0]
    return mx.concatenate([array, zeros()[count:]])[:count] if count < WORDS else array


_on_cuda = cache(on_cuda)


@cache
def zeros() -> mx.array:
    """Zeros that fill a buffer."""
    return mx.zeros((WORDS,), dtype=mx.int32)
