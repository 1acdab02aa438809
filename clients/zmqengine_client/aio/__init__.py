"""The half for asyncio: a session on the running event loop, streams for `async for`.

client.py        `AsyncClient`
group.py         many streams read by one task
streams.py       one stream
mailbox.py       how a task waits
loop_driver.py   sockets and the session on an event loop
"""
