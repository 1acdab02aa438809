"""Ports for servers that cannot be asked which one they got, or that have to come back to the one they had."""

from __future__ import annotations

import random
import socket

_UNUSUAL = range(20_000, 32_000)
"""Below those that systems give to whoever asks for any port: nobody takes one of these before the server does."""
_claims: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of this machine that is free, and that no other test is given while this process lives.

    The claim is the UDP port of the same number: it is nobody's but ours, and goes with the process, however it ends.
    """
    for port in random.SystemRandom().sample(_UNUSUAL, 100):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return port
    raise AssertionError("a hundred ports are all in use")


def is_refused(port: int) -> bool:
    """Whether no socket listens on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False
