"""Ports for servers that cannot be asked which one they got."""

from __future__ import annotations

import random
import socket

_UNUSUAL = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any port: nobody takes one of these before the server does."""


def free_port() -> int:
    """A port of this machine that is free, and that nobody else is given by chance."""
    for port in random.SystemRandom().sample(_UNUSUAL, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports are all in use")
