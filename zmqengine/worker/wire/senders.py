"""Sender of a frame, as far as ZeroMQ and the kernel know."""

from __future__ import annotations

import zmq


def user_of(frame: zmq.Frame) -> str:
    """The key behind a frame, as the key check named it; empty where there are no keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def process_of(frame: zmq.Frame) -> str:
    """The process behind a frame that came in on ipc, as the kernel knows it; empty where it does not tell."""
    try:
        # "localhost:uid:gid:pid"; macOS leaves the last out. Over tcp it is the host, which many may share.
        _, user, group, process = str(frame.get("Peer-Address")).split(":")
    except (zmq.ZMQError, ValueError):
        return ""
    return f"process {process}" if process.isdigit() and user.isdigit() and group.isdigit() else ""
