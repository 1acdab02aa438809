"""A live view of workers on a terminal: a front-end like any other, on the client library alone."""

from __future__ import annotations
