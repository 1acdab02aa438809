"""Prefix cache: KV blocks of prompts and outputs, computed once and shared by later rows, in memory and on disk.

Files, in reading order:

block.py        a block, and the chain of hashes that names it
index.py        the tree of blocks by hash: how much of a prompt is cached
eviction.py     the order of eviction
block_pool.py   blocks in memory: bytes, eviction, pins, the lower tier
offers.py       blocks that are not valid yet
parked_rows.py  caches of preempted rows
branches.py     positions of checkpoints in a prompt
store.py        `PrefixCache`: what the rest of the engine calls
disk/           the lower tier, in files

Theory of operation
-------------------

A **block** is 64 tokens of a prompt (fewer at its end) and their keys and values in every layer that can be cut at any
token. Layers that cannot (sliding windows, recurrent states) have a **checkpoint** instead: their whole state after the
last token of some block. A model with such layers can resume at checkpoints only, so a leaf without one is of no use.

**Names.** The key of a block hashes its tokens and the key of the block before it; the first block chains to a salt of
model and scope. Equal keys mean equal prefixes under equal facts, so scopes share nothing, processes agree on names,
and a lookup is one dict access per block. Tokens are compared only within the first block that differs.

**Life of a block.** A row that has computed tokens *offers* copies of them. An offer is invisible until a finite logit
was computed from it: `accept` makes its blocks *valid* and adds them to the index, `withdraw` drops them, so a row with
NaN poisons no other. Valid blocks stay until memory is needed. Then are evicted, in this order: evictable leaves by
worth (`eviction.py`), offers, blocks held for a request that waits, pinned prompts, and last the caches of preempted
rows, which a running request still needs. A block is evicted after its children: every block in the index is reachable.

**Disk** is a second tier. Memory reports added and evicted blocks to it (`block_pool.LowerTier`); the actor copies
blocks to the host, a little in each pass, and a thread writes them in files of consecutive blocks. If a request's
prefix is on disk, a thread reads it before the request waits for a row; the actor builds arrays of it and adds them as
valid blocks, which are held until the row has begun. Only the actor touches MLX: threads see bytes.

**A crash loses blocks, never correctness.** A file is written under a temporary name, fsynced, renamed, and never
changed; then its directory is fsynced. A torn write is a temporary file, which is never read and is removed by the next
writer. Whatever else happens to a file, its header and each of its blocks carry a checksum, and no byte is used before
its checksum was found right. Nothing else is on disk: the index of files is rebuilt from their headers.
"""
