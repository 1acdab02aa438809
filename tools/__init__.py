"""What is made from something else in this repository: `python -m tools` makes it all anew, a test says when to.

sync_half.py           the threaded half of the client, from the asyncio half
phase_drawings.py      the client's phases, from their tables
module_graph.py        which file imports which
pages.py               pages that hold what is made
"""
