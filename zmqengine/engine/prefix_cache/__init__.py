"""Prompts that were read once: what their caches hold, kept by blocks of tokens, so that it is not computed again.

keys.py         names of beginnings of prompts: chained hashes of their blocks
block.py        what one block holds: keys and values of its tokens, or the state after them
index.py        the tree of kept blocks, and how much of a prompt is in it
eviction.py     which of them goes next
kept_blocks.py  that tree within its bytes: what comes and goes
staying.py      what of it may not go: it is pinned, or awaited
lookup.py       rows in it
offers.py       blocks that nobody gets before their row has made a number
parked_rows.py  rows that were taken out of the batch and will come back
branches.py     where in a prompt a state that cannot be cut is worth keeping
counts.py       what became of prompts
store.py        all that, within a number of bytes: what the rest of the engine calls
tier.py         what the store knows of a slower one behind it
disk/           the one on disk

The store is `PrefixCache`. A prompt is found by the keys of its blocks and its scope: rows of different scopes share
nothing. What is read is *offered*, and *accepted* when a finite logit was made of it. Nothing here takes a cache apart:
`engine/kv/blocks.py` does. Only the actor calls it; what is on disk is read and written by threads that get host bytes.
"""
