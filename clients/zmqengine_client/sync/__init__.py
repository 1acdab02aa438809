"""The half for threads: a session on a thread of its own, streams to iterate over.

client.py            `Client`
group.py             many streams read by one thread
streams.py           one stream
questions.py         questions on ctl
model_tokenizer.py   the tokenizer of the model that is served now

These are made from `aio` by `python -m tools`. By hand, because threads wait in another way:

preparation.py       prompts become token ids, on the thread that asks
waiting.py           how a thread waits
io_thread.py         the thread that owns sockets and session
"""
