"""The prefix cache on disk: for the next worker, and for blocks that memory has no room for.

tier.py           what the engine and the worker call
saving.py         which blocks are written, copied to the host piece by piece
host_arrays.py    arrays as bytes of the host, and back
writer.py         the thread that writes them
unwritten.py      what is on its way to a file
restoring.py      which blocks of a prompt are worth reading, and reading them
directory.py      the directory: what is in it, what is of no use
own_directory.py  is made for this user alone
room.py           how much it may take, and which files go for others
file_index.py     which block is in which file
daily_writes.py   how much was written today
block_file.py     the file: safetensors, with checksums
block_header.py   what it says of itself
host_block.py     a block in memory of the host

The way of a block: `PrefixCache` tells the tier of it; `saving.py` copies it when a pass has time, with those that
follow it; `writer.py` writes them, `directory.py` makes room first. When a prompt comes, `restoring.py` finds its
blocks and reads them on a thread; the actor makes arrays of them and gives them to `PrefixCache.insert_blocks`.
"""
