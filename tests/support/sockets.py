"""What raw sockets of tests have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import zmq


def send_if_open(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send, unless the other side has refused or ended the connection: then there is nowhere to send to."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(frames, zmq.DONTWAIT)
