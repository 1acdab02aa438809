"""Many streams read by one task, streams added while it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from zmqengine_client.aio.mailbox import AsyncInbox, AsyncMailbox
from zmqengine_client.aio.streams import AsyncStream

ChunkT = TypeVar("ChunkT")


@dataclass(frozen=True, slots=True)
class News(Generic[ChunkT]):
    """What is new of one stream: a chunk, its end, or both."""

    stream: AsyncStream[ChunkT]
    chunk: ChunkT | None
    ended: bool


class AsyncGroup(Generic[ChunkT]):
    """Streams that are read together: one `wait` gives what all of them got in one turn of the event loop.

    A stream that is added here is read nowhere else. It leaves the group with its end or with `discard`; dropping the
    group aborts no stream.
    """

    def __init__(self) -> None:
        self._mailbox = AsyncMailbox()
        self._streams: dict[AsyncInbox, AsyncStream[ChunkT]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: AsyncStream[ChunkT]) -> None:
        """Read this one too, from what it has already."""
        inbox = stream._inbox
        inbox.mailbox = self._mailbox
        self._streams[inbox] = stream
        self._mailbox.put(inbox)

    def discard(self, stream: AsyncStream[ChunkT]) -> None:
        """Read it no more."""
        self._streams.pop(stream._inbox, None)

    async def wait(self) -> list[News[ChunkT]]:
        """What is new, at least of one stream; waits for it. For one task at a time.

        Raises nothing of the streams: look at `stream.result` of those that ended.
        """
        while True:
            news = []
            for inbox in await self._mailbox.wait():
                stream = self._streams.get(inbox)
                if stream is None:
                    continue
                chunk = stream._take()
                if stream.ended:
                    del self._streams[inbox]
                if chunk is not None or stream.ended:
                    news.append(News(stream, chunk, stream.ended))
            if news:
                return news
