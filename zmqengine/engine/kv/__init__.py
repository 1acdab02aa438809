"""All that is known of mlx-lm's caches: nothing outside this folder looks inside one.

rows.py     caches of one row: new, cut, copied, checked, in bytes
batch.py    caches of a batch: merged from rows, extended, reduced, taken apart
blocks.py   what caches hold, taken apart by tokens and put together again
parts.py    short rows that leave a batch together
plain.py    the same for plain caches, all layers together
in_place.py  rows that come and go while the others stay where they are
ragged.py   a batch whose rows go back by unlike numbers of tokens
gathered.py  copies of some rows, or of columns in another order
spans.py    which columns each row sees, where no mask is needed
reading.py  reading prompt tokens into either
shape.py    what caches of a model take in bytes, from real ones
"""

from zmqengine.engine.kv.batch import begin_step, can_merge, extend, extract, keep_rows, merge
from zmqengine.engine.kv.blocks import BlockLayout, Place, State
from zmqengine.engine.kv.in_place import arranged, empty_bytes, moves_rows
from zmqengine.engine.kv.parts import Part, parts_of
from zmqengine.engine.kv.ragged import RaggedKVCache, can_go_back, close_gaps, go_back, make_room
from zmqengine.engine.kv.reading import beginning, read_alone, read_together
from zmqengine.engine.kv.rows import (
    all_finite,
    arrays,
    as_batch,
    byte_count,
    new_caches,
    start,
)
from zmqengine.engine.kv.shape import CacheShape, measure_caches
from zmqengine.engine.kv.spans import Spans

__all__ = [
    "BlockLayout",
    "CacheShape",
    "Part",
    "Place",
    "RaggedKVCache",
    "Spans",
    "State",
    "all_finite",
    "arranged",
    "arrays",
    "as_batch",
    "begin_step",
    "beginning",
    "byte_count",
    "can_go_back",
    "can_merge",
    "close_gaps",
    "empty_bytes",
    "extend",
    "extract",
    "go_back",
    "keep_rows",
    "make_room",
    "measure_caches",
    "merge",
    "moves_rows",
    "new_caches",
    "parts_of",
    "read_alone",
    "read_together",
    "start",
]
