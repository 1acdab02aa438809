"""KV caches: nothing outside this folder looks inside one of mlx-lm's.

batch.py     KVBatch, the caches of a batch and their only owner
blocks.py    blocks of tokens cut out of caches, and caches built of blocks
rows.py      caches of one row: new, cut, checked, in bytes
reading.py   prefill of one row, or of the rows of a batch
parts.py     short rows that leave a batch are copied out of it together
plain.py     changes of the plain caches of a batch, all layers at once
in_place.py  rows that come and go while the others stay where they are
ragged.py    the cache of a layer, whose rows roll back by different counts of tokens
gathered.py  copies of some rows, or of columns in another order
spans.py     the columns that each row sees, where no mask is needed
shape.py     bytes that a model's caches take, measured
"""

from zmqengine.engine.kv.batch import BatchRow, KVBatch, can_merge
from zmqengine.engine.kv.blocks import BlockLayout, State
from zmqengine.engine.kv.ragged import RaggedKVCache
from zmqengine.engine.kv.reading import beginning, read_alone
from zmqengine.engine.kv.rows import all_finite, arrays, byte_count, new_caches, start
from zmqengine.engine.kv.shape import CacheShape, measure_caches
from zmqengine.engine.kv.spans import Spans

__all__ = [
    "BatchRow",
    "BlockLayout",
    "CacheShape",
    "KVBatch",
    "RaggedKVCache",
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
