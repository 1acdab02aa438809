"""A connection is ended by its descriptor, which may have passed to somebody else meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import pytest
import zmq

from zmqengine.worker.wire.connection_limiter import doors_of
from zmqengine.worker.wire.descriptors import files_open
from zmqengine.worker.wire.refused_topics import RefusedTopics


class Frame:
    """What is asked of a frame that came by this descriptor from this process."""

    def __init__(self, fd: int, pid: int) -> None:
        self._facts: dict[Any, object] = {
            zmq.SRCFD: fd,
            "Peer-Address": f"localhost:{os.getuid()}:{os.getgid()}:{pid}",
        }

    def get(self, name: Any) -> object:
        return self._facts[name]


@pytest.mark.skipif(sys.platform != "linux", reason="only there the process behind a connection is known")
def test_a_descriptor_that_has_passed_to_another_process_is_spared() -> None:
    """The offender has gone, and its descriptor is that of a connection from here: this one goes on."""
    topics = RefusedTopics()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        gone: Any = Frame(ours.fileno(), os.getpid() + 1)
        assert not topics.end(gone)
        theirs.send(b"honest")
        assert ours.recv(16) == b"honest"
        offender: Any = Frame(ours.fileno(), os.getpid())
        assert topics.end(offender)
        assert theirs.recv(16) == b""
    closed: Any = Frame(ours.fileno(), os.getpid())
    assert not topics.end(closed)


def test_a_descriptor_that_has_passed_to_a_file_takes_no_other() -> None:
    """Each offence of a connection that was gone left one open, until the worker took no more connections."""
    topics = RefusedTopics()
    pair: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    (door,) = doors_of([pair], [], connections_max=0)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(os.devnull)).fileno() for _ in range(4)]
        before = files_open()
        for fd in files:
            gone: Any = Frame(fd, os.getpid())
            assert not topics.end(gone)
            door.accepted(fd)
        assert files_open() == before
    pair.close(0)
