"""Generators of files in this repository: `python -m tools` runs them all; a test fails when a file is stale.

sync_half.py           the threaded half of the client, from the asyncio half
phase_drawings.py      the client's phases, from their tables
module_graph.py        the imports among modules
pages.py               pages with generated parts
http_fields.py         the table of request fields in docs/http-clients.md
"""
