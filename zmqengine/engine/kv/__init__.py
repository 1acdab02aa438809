"""KV caches: nothing outside this folder looks inside one of mlx-lm's.

kv_batch.py     KVBatch, the caches of a batch and their only owner
layout.py       the columns of each row, common to all layers
layer.py        the cache of one layer, as the model sees it
kernels.py      what depends on the device, and how plain MLX does it
generations.py  the rules of writing in place, asserted
block_layout.py blocks cut out of caches for the prefix cache, and caches built of blocks
grouped_copies.py  short rows that leave a batch, copied together
row_caches.py   caches of one row
rotating.py     sliding-window caches of mlx-lm
shape.py        bytes that a model's caches take, measured

Layout. A batch is a rectangle in each layer, [rows, heads, columns, width]. It is right-justified: every row's newest
token is in the last column in use, after it there are spare columns to grow into. Before its tokens a row has padding.
A step of `width` writes that many columns of every row. Rows roll back by unlike counts: columns that all rows give up
are used again, the others become gaps, masked slots that every attention mask leaves out. Gaps and padding are closed
by a copy, when the batch is copied anyway or when they take too much of it.

    row   columns                            length  padding
    A     a a a a a a a a a a . . . .        10      0          - padding   x gap   . spare
    B     - - - - b b b b x b . . . .        5       4

All layers that keep every token have the same layout. It is kept once, on the host and for kernels on the device.

Writing in place. For MLX, arrays are immutable: a write creates a new array, in the memory of the old one if it has no
other reference, else in a copy. Rows that join or leave copy the batch. On CUDA that is too slow: each write is a call,
and copies the cache while the step before still refers to it. There the model's layers write their columns into the
arrays, and rows move between rows of the arrays (`KVKernels.move_rows`), unknown to MLX. The arrays have rows and
columns to spare; where these run out, or too many are unused, one kernel copies all rows into new arrays and closes
gaps (`KVKernels.repack`). MLX computes lazily: a computation built from an array reads its memory when it is *started*
(`mx.async_eval`). All work is on one stream, which keeps the order in which it was started. So it is safe to write in
place if:

1. The memory is the batch's alone. The result of this layer's own write by MLX is (`Arrays.OWNED`), as are arrays
concatenated of several and those of `repack`; an array that a row brought, or that was copied or cut in another way,
may be shared with a row, a block of the prefix cache or a larger array. MLX also returns an array itself in place of a
copy that would be hardly smaller, so rows of few bytes are not moved. A trace takes a view of constant shape
(`RaggedKVCache.corners`): a layer drops it with its arrays, or MLX's own write would copy them.
2. What reads columns is started before they are written again. A step is started (`KVBatch.launch`) before anything
   else is done with the batch. Copies that were cut out of it are started before its rows move, join or leave.
3. What reads written columns is started after the write was. A copy is cut from steps that were started, and columns
   of a step that may be rolled back are not cut.
4. A row is read at its current index. Indices of rows are valid until rows join or leave: `keep_rows` returns the new
order, and an older `BatchRow` is refused.

Decode steps on a CPU (`models/step_ops.py`) only append columns, at once and not on the stream: copies that were
started read earlier columns, or columns of a step that has landed. Rows do not move there.

A row in prefill has arrays of its own (`RowKVCache`), allocated once with room for its prompt, and only appends to
them: there is no other writer, and readers of earlier columns are not disturbed. So only rules 1 and 3 apply.
`RowKVCache.can_write_here` keeps rule 1; for rule 3, the arrays that `wrote_in_place` leaves depend on the write.
The caches of texts side by side are read by the vectors of these texts alone, which a step starts. Then they are
`rewound`, and the next segment of texts overwrites them: rule 2 holds, and there is no reader for rule 3.

`KVBatch` keeps rules 2 and 4, `RaggedKVCache.can_write_here` rule 1. With ZMQENGINE_CHECK_KV=1, as in tests, rule 2 is
asserted for every row and column (`generations.py`). A model that is stepped several times before its first step is
started, as the draft model is, must not write in place.
"""

from zmqengine.engine.kv.block_layout import BlockLayout, Source, State
from zmqengine.engine.kv.kernels import PLAIN, KVKernels, PlainKernels
from zmqengine.engine.kv.kv_batch import BatchRow, KVBatch, can_merge
from zmqengine.engine.kv.layer import RaggedKVCache
from zmqengine.engine.kv.layout import Spans
from zmqengine.engine.kv.row_caches import (
    RowKVCache,
    all_finite,
    arrays,
    begin_row_prefill,
    byte_count,
    end_row_prefill,
    new_caches,
    prefill_row,
    rewound,
    room,
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
    "RowKVCache",
    "Source",
    "Spans",
    "State",
    "all_finite",
    "arrays",
    "begin_row_prefill",
    "byte_count",
    "can_merge",
    "end_row_prefill",
    "measure_caches",
    "new_caches",
    "prefill_row",
    "rewound",
    "room",
    "start",
]
