"""The session without I/O: frames and the time in, frames and news out. It imports no sockets, threads or clocks.

session.py            one front-end and one worker: what the two halves drive
session_config.py     who the client is, and how long it waits
phases.py             the phases of a connection and of a request, as tables

control.py            questions on ctl and their answers
describing.py         the one that is asked again and again
presence.py           what is known of the worker
patience.py           how long it is waited for

dialogue.py           what is said on cmd
connection.py         the way to a session, and back when it is lost
calls.py              commands that wait for their reply
liveness.py           keeps a session alive, and finds out when nobody is there

request_table.py      the requests of a session: what the connection and answers do to them
live_requests.py      those that have not ended: how they come, get their tokens, and leave
inserting.py          brings them to the worker, or tells why it would refuse them
acknowledgements.py   ends that the worker may forget
request.py            one request, and who reads its tokens

options.py            the options of a generation
constrained.py        what an output must be, and the object that comes of it
chunks.py             what a stream gives
stream_state.py       what a stream is, however its chunks are waited for
events.py             what happened to the connection, and counters
actions.py            what the core asks to be done
outbox.py             actions, news and events until the half looks
"""
