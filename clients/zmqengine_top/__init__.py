"""A live view of workers on a terminal, built on the client library alone."""

from __future__ import annotations
