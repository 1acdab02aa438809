"""The session without I/O: frames and the time in, frames and news out. It imports no sockets, threads or clocks.

session.py            one conversation with one worker: what the two halves drive
connection.py         the way to a session, and back when it is lost
control.py            questions on ctl and their answers
calls.py              commands on cmd that wait for their reply
liveness.py           keeps a session alive, and finds out when nobody is there
request_table.py      the requests of a session
request.py            one of them
inserts.py            a request as a command, and why a worker would refuse it
acknowledgements.py   ends that the worker may forget
actions.py            what the core asks to be done, and whom to wake
telling.py            wakes them
events.py             what happened to the connection, and counters
options.py            the options of a generation
constrained.py        what an output must be, and the object that comes of it
chunks.py             what a stream gives
stream_state.py       what a stream is, however its chunks are waited for
"""
