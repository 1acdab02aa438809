"""Options of ZeroMQ sockets on tcp, by which each end notices that the other has vanished without closing."""

from __future__ import annotations

import zmq

PROBE_S = 5
"""Seconds between two probes of an idle connection by the system."""


def vanished_s(probes_max: int) -> int:
    """Seconds of silence after which a connection is closed, whether or not frames wait for acknowledgement."""
    return PROBE_S * (1 + probes_max)


def probe(socket: zmq.Socket[bytes], probes_max: int) -> None:
    """Have the system probe connections of `socket`, and close one that leaves `probes_max` probes unanswered.

    Not by heartbeats of libzmq: the next one on a connection that was lost while its frames wait ends the process
    (libzmq 4.3.5, an assertion of `out_event` in src/stream_engine_base.cpp).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes_max)
    # The system does not probe a connection with unacknowledged frames.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * vanished_s(probes_max))
