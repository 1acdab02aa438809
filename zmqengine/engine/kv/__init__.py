"""KV caches: nothing outside this folder looks inside one of mlx-lm's.

batch.py     KVBatch, the caches of a batch and their only owner
layout.py    the columns of each row, common to all layers
layer.py     the cache of one layer, as the model sees it
kernels.py   what depends on the device, and how plain MLX does it
blocks.py    blocks cut out of caches for the prefix cache, and caches built of blocks
parts.py     short rows that leave a batch, copied together
rows.py      caches of one row
rotating.py  sliding-window caches of mlx-lm
shape.py     bytes that a model's caches take, measured
"""

from zmqengine.engine.kv.batch import BatchRow, KVBatch, can_merge
from zmqengine.engine.kv.blocks import BlockLayout, Source, State
from zmqengine.engine.kv.kernels import PLAIN, KVKernels, PlainKernels
from zmqengine.engine.kv.layer import RaggedKVCache
from zmqengine.engine.kv.layout import Spans
from zmqengine.engine.kv.rows import (
    all_finite,
    arrays,
    beginning,
    byte_count,
    new_caches,
    read_alone,
    start,
)
from zmqengine.engine.kv.shape import CacheShape, measure_caches

__all__ = [
    "PLAIN",
    "BatchRow",
    "BlockLayout",
    "CacheShape",
    "KVBatch",
    "KVKernels",
    "PlainKernels",
    "RaggedKVCache",
    "Source",
    "Spans",
    "State",
    "all_finite",
    "arrays",
    "beginning",
    "byte_count",
    "can_merge",
    "measure_caches",
    "new_caches",
    "read_alone",
    "start",
]
