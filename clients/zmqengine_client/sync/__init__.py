"""The half for threads: a session on a thread of its own, streams to iterate over.

client.py      `Client`
streams.py     one stream
mailbox.py     how a thread waits
io_thread.py   the thread that owns sockets and session
"""
