"""Sockets of the client."""

from __future__ import annotations

import zmq

from zmqengine_client.transport import Transport


def test_a_far_worker_is_probed_by_the_system_and_not_by_libzmq() -> None:
    """A heartbeat on a connection that was lost while frames wait would end the program."""
    opened: list[zmq.Socket[bytes]] = []
    transport = Transport("tcp://127.0.0.1:9", None, watch=opened.append, unwatch=opened.remove)
    try:
        assert opened
        for ours in opened:
            if ours.getsockopt(zmq.TYPE) == zmq.DEALER:
                assert ours.getsockopt(zmq.HEARTBEAT_IVL) == 0
                assert ours.getsockopt(zmq.TCP_KEEPALIVE) == 1
                assert ours.getsockopt(zmq.TCP_MAXRT) == 30_000
    finally:
        transport.close()
