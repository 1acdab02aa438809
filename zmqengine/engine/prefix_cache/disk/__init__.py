"""Prefix cache on disk: the tier below memory, shared by workers and kept for later ones.

block_file.py  the format of a file: safetensors, with checksums
file_index.py  which block is in which file
directory.py   the files: read, written, bounded, with others at the same time
write_thread.py  the thread that writes
plan.py        which blocks of a prompt to read
tier.py        `DiskTier`: what memory, the engine and the worker call

A block goes to disk: `DiskTier` copies it to the host when a pass has time, or when memory evicts it first; `Writer`
passes runs of consecutive blocks to `Directory`, which makes room and writes one file for each. A block is restored: a
plan is made from the index when the turn of its request comes, a thread reads the blocks of the prompt, and the actor
builds arrays of them and adds them to `PrefixCache`.

The disk may hang or be full. Only threads wait for it: the actor looks into the index and copies bytes to a bounded
queue. While the queue is full, or for a minute after a write failed, blocks are not written and `status` counts them.
"""
