"""Many streams read by one thread."""

from __future__ import annotations

from typing import Any

import pytest

from zmqengine.testing import FakeWorker
from zmqengine_client import Client, Group, TokenChunk


def test_streams_are_read_together_and_one_that_leaves_by_itself(worker: FakeWorker) -> None:
    """Each gives all of its tokens and one end, wherever it is read."""
    with Client(worker.address) as client:
        group: Group[TokenChunk] = Group()
        streams: dict[Any, int] = {
            client.generate_tokens([number + 1], max_tokens=20, seed=0): number for number in range(4)
        }
        for stream in streams:
            group.add(stream)
        left = next(stream for stream, number in streams.items() if number == 3)
        group.discard(left)
        tokens: dict[int, list[int]] = {number: [] for number in range(3)}
        while len(group):
            for news in group.wait():
                assert news.stream is not left
                tokens[streams[news.stream]] += news.chunk.tokens if news.chunk is not None else []
        for number in range(3):
            assert tokens[number] == worker.expected_tokens([number + 1], 20)
        assert left.read().tokens == worker.expected_tokens([4], 20)


def test_nobody_waits_for_a_client_that_is_closed(worker: FakeWorker) -> None:
    """What has come can still be read; then there is an error, and no thread that waits for ever."""
    with Client(worker.address) as client:
        group: Group[TokenChunk] = Group()
        stream = client.generate_tokens([1], max_tokens=2000, ignore_eos=True)
        group.add(stream)
        group.wait()
    while len(group):
        group.wait()
    assert stream.result.finish == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        client.generate_tokens([1])
