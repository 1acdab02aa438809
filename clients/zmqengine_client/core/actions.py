"""What the core asks of the half that drives it: frames to send, sockets to open and close."""

from __future__ import annotations

from typing import Literal, NamedTuple

Channel = Literal["ctl", "cmd", "out"]


class Send(NamedTuple):
    """Send these frames. If the socket cannot take them now they may be dropped: the core repeats what matters."""

    channel: Channel
    frames: tuple[bytes, bytes]


class OpenControl(NamedTuple):
    """Connect a new DEALER to the worker's ctl address: libzmq does not try again where a key was refused."""


class OpenCommands(NamedTuple):
    """Connect a new DEALER to the worker's cmd address."""

    address: str


class OpenOutput(NamedTuple):
    """Make a new SUB, subscribe to exactly `topic`, then connect. It replaces an open one."""

    address: str
    topic: bytes


class CloseWorkerSockets(NamedTuple):
    """Close cmd and out with all that is queued on them."""


Action = Send | OpenControl | OpenCommands | OpenOutput | CloseWorkerSockets
