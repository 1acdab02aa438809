"""KV caches of our own decoder; every other model has mlx-lm's (models/mlx_lm_runner.py).

slots.py         Slots: keys and values of rows
block_layout.py  blocks cut out of caches for the prefix cache, and caches built of blocks
eight_bits.py    keys and values in 8 bits
packed_blocks.py blocks in 8 bits of caches with all bits
few_sizes.py     sizes of arrays rounded up, for traces and freed buffers

A **slot** is a row's place in arrays [slots, heads, capacity, dim], two for each layer. The row begins at column 0 and
stays there: prefill, decode and verify blocks write the columns of the tokens that they compute. A join copies nothing,
and neither does a rollback: columns behind `Row.computed_tokens` are written again. Slots come in few capacities, so
that a row leaves at most half of its slot unused; a row that outgrows its slot is copied to a larger one, alone.

A pool grows by half, where memory has room for rows to come. What no row has is freed when the rest of the memory is
needed (`MemoryLedger.settle`): then rows move to the first slots of new arrays.

    slot   columns                             computed_tokens
    0      a a a a a a a a a a . . . . . .     10
    1      b b b b b x . . . . . . . . . .     5        x: a rejected draft token, overwritten by the next step
    2      . . . . . . . . . . . . . . . .     free

**In 8 bits** keys and values of a layer are three arrays each (`PackedColumns`), all of that form. Groups lie along the
head dimension, so a column is written alone, and written again as any other.

**In place.** For MLX arrays are immutable. An indexed assignment creates a new array, in the memory of the old one if
nothing else refers to that, else in a copy of it. A step in flight refers to what it reads until the device is done.
Hence, with MLX's own operations, two rules keep writes in place:

1. The step before has landed when a step is launched (`MlxEngine.next`). Its graph may be built before.
2. Copies out of slots (blocks for the prefix cache, moves to larger slots) are computed before the next step is
   launched: `MlxEngine` waits for them.

A mistake costs memory traffic and no correctness: MLX then copies a pool's array, as `tests/engine/kv/test_in_place.py`
would notice by peak memory.

Kernels of a back-end may write into the arrays unknown to MLX (`SlotStorage.writes_in_place`). Then steps are launched
ahead, and the order of the one stream replaces both rules: a computation reads memory in the order in which it was
*started*, so what reads columns is started before they are written again, and what reads written columns after the
write. `PrefixCache.settle` starts copies at once.

**Recurrent states** are arrays [slots, ...] of a pool of their own (`StatePool`), one place a row, whatever its slot's
capacity. MLX's operations replace these arrays, all places at once; kernels write into them. A verify block leaves them
as they were and is held (`HeldBlock`): its accepted tokens are applied before the next step, or to the copy that a
checkpoint of the prefix cache takes. A row's first tokens read no state, so that nothing is cleared.

**Numbers that are not finite.** Attention multiplies columns that it masks by 0, and 0 times NaN is NaN. So a slot is
cleared before its next use unless its row ended with a finite logit.
"""
