"""The half for asyncio: a session on the running event loop, streams for `async for`.

client.py            `AsyncClient`
group.py             many streams read by one task
streams.py           one stream
deciding.py          the probabilities of given answers
questions.py         calls on ctl
model_tokenizer.py   the tokenizer of the model that is served now
preparation.py       tokenisation of prompts, off the loop
waiting.py           mailboxes, on which a task waits
loop_driver.py       sockets and the session on an event loop
"""
