"""The session without I/O: frames and the time in, frames and news out. It imports no sockets, threads or clocks.

session.py            one front-end and one worker: what the two halves drive
session_config.py     who the client is, and how long it waits
phases.py             the phases of a connection and of a request, as tables

control.py            questions on ctl and their answers
describing.py         the one that is asked again and again
presence.py           what is known of the worker
patience.py           how long it is waited for

dialogue.py           what is said on cmd and out
connection.py         the way to a session, and back when it is lost
calls.py              commands that wait for their reply
liveness.py           keeps a session alive, and finds out when nobody is there

request_table.py      the requests of a session
live_requests.py      those that have not ended
inserting.py          brings them to the worker
receiving.py          fills them from what is published
acknowledgements.py   ends that the worker may forget
inserts.py            a request as a command, and why a worker would refuse it
request.py            one request

options.py            the options of a generation
constrained.py        what an output must be, and the object that comes of it
chunks.py             what a stream gives
stream_state.py       what a stream is, however its chunks are waited for
events.py             what happened to the connection, and counters
actions.py            what the core asks to be done
outbox.py             actions, news and events until the half looks
"""
