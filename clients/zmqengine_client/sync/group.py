# Made from ../aio/group.py by `python -m tools`: change that one.
"""Many streams read by one thread, streams added while it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from zmqengine_client.sync.streams import Stream
from zmqengine_client.sync.waiting import Mailbox, Notifier

ChunkT = TypeVar("ChunkT")


@dataclass(frozen=True, slots=True)
class News(Generic[ChunkT]):
    """What is new of one stream: a chunk, its end, or both."""

    stream: Stream[ChunkT]
    chunk: ChunkT | None
    ended: bool


class Group(Generic[ChunkT]):
    """Streams that are read together: one `wait` gives what all of them have got.

    A stream that is added here is read nowhere else. It leaves the group with its end or with `discard`; dropping the
    group aborts no stream.
    """

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._streams: dict[Notifier, Stream[ChunkT]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream[ChunkT]) -> None:
        """Read this one too, from what it has already."""
        notifier = stream._notifier
        notifier.mailbox = self._mailbox
        self._streams[notifier] = stream
        self._mailbox.put(notifier)

    def discard(self, stream: Stream[ChunkT]) -> None:
        """Read it no more: it can be read by itself again."""
        known = self._streams.pop(stream._notifier, None) is not None
        # A generator that was left closes late: another group may have the stream by now.
        if known and stream._notifier.mailbox is self._mailbox:
            stream._notifier.mailbox = Mailbox()

    def wait(self) -> list[News[ChunkT]]:
        """What is new, at least of one stream; waits for it. For one thread at a time.

        Raises nothing of the streams: look at `stream.result` of those that ended.
        """
        while True:
            news = [each for notifier in self._ready() if (each := self._take(notifier)) is not None]
            if news:
                return news

    def _ready(self) -> list[Notifier]:
        """Of which streams there may be news; waits for it."""
        if not self._mailbox.has_news:
            self._check()
        return self._mailbox.wait()

    def _take(self, notifier: Notifier) -> News[ChunkT] | None:
        """The news of one stream, taken from it; None if there are none."""
        stream = self._streams.get(notifier)
        if stream is None:
            return None
        chunk = stream._take()
        if stream.ended:
            del self._streams[notifier]
        return News(stream, chunk, stream.ended) if chunk is not None or stream.ended else None

    def _check(self) -> None:
        """Raise RuntimeError if waiting is no use."""
        for stream in self._streams.values():
            stream._owner.check()
            return
