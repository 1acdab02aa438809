"""Identity of a frame's sender, as far as ZeroMQ and the kernel know it."""

from __future__ import annotations

import zmq


def user_of(frame: zmq.Frame) -> str:
    """The key of a frame's sender, as named by the key check; empty without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def process_of(frame: zmq.Frame) -> str:
    """The process of the sender of a frame on ipc; empty where the kernel does not know it."""
    try:
        # "localhost:uid:gid:pid"; macOS omits the last. Over tcp it is the host, which many processes may share.
        _, user, group, process = str(frame.get("Peer-Address")).split(":")
    except (zmq.ZMQError, ValueError):
        return ""
    return f"process {process}" if process.isdigit() and user.isdigit() and group.isdigit() else ""
