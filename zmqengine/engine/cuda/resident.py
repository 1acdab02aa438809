"""Small arrays that every kernel of a step reads, where the device need not fetch them from the host's memory.

MLX keeps what the host makes or reads on CUDA in managed memory, in which small arrays share pages: whenever the host
looks at one, all of them move. So those that a step reads in every layer are copied into a buffer of a size that
nothing else of the host's has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from zmqengine.engine.host.backend import on_cuda

WORDS = 12_288
"""That size, in numbers of 4 bytes."""


def resident(values: Sequence[int] | mx.array) -> mx.array:
    """These numbers, as int32."""
    array = values if isinstance(values, mx.array) else mx.array(list(values), dtype=mx.int32)
    if not _on_cuda():
        return array
    count = array.shape[0]
    return mx.concatenate([array, zeros()[count:]])[:count] if count < WORDS else array


_on_cuda = cache(on_cuda)


@cache
def zeros() -> mx.array:
    """As many as such a buffer holds."""
    return mx.zeros((WORDS,), dtype=mx.int32)
