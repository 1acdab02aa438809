"""The session without I/O: frames and the time in, actions and changes out. It imports no sockets, threads or clocks.

session.py            one front-end and one worker: what the two halves drive
phases.py             the phases of a connection and of a request, as tables

control.py            calls on ctl and their replies, `describe` repeated until the worker is ready
presence.py           the worker as seen through ctl, and how long a client waits for it

dialogue.py           the conversation on cmd
connection.py         SessionConfig; from describe to a live session, and back when it is lost
calls.py              commands that wait for their reply, acknowledgements in batches
liveness.py           keepalives, and the detection of a worker that is gone

request_table.py      the requests of a session under aborts, replies and changes of the connection
live_requests.py      requests that have not ended: added, filled with tokens, resumed, ended
inserting.py          sends inserts, again after a restart; refuses locally what the worker would refuse
request.py            one request, and the reader of its tokens

options.py            the options of a generation
constrained.py        output constraints, and the object parsed from a constrained output
chunks.py             chunks and completions of streams
stream_state.py       the part of a stream that never waits
outbox.py             everything handed to the half: actions on sockets, changed requests, events, counters
"""
