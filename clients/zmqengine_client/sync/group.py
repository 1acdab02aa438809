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
    """News of one stream: a chunk, its end, or both."""

    stream: Stream[ChunkT]
    chunk: ChunkT | None
    ended: bool


class Group(Generic[ChunkT]):
    """Streams that are read together: one `wait` returns the news of all of them.

    A stream in a group must not be read elsewhere. It leaves the group with its end or with `discard`; dropping the
    group aborts no stream.
    """

    def __init__(self) -> None:
        self._mailbox = Mailbox()
        self._streams: dict[Notifier, Stream[ChunkT]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream[ChunkT]) -> None:
        """Add a stream, from the chunks it already has."""
        notifier = stream._notifier
        notifier.mailbox = self._mailbox
        self._streams[notifier] = stream
        self._mailbox.put(notifier)

    def discard(self, stream: Stream[ChunkT]) -> None:
        """Remove a stream; it can be read by itself again."""
        known = self._streams.pop(stream._notifier, None) is not None
        # An abandoned generator is closed late: another group may own the stream by now.
        if known and stream._notifier.mailbox is self._mailbox:
            stream._notifier.mailbox = Mailbox()

    def wait(self) -> list[News[ChunkT]]:
        """News of at least one stream; waits for the first. For one thread at a time.

        Errors of streams are not raised here: `stream.result` of an ended stream raises them.
        """
        while True:
            news = [each for notifier in self._ready() if (each := self._take(notifier)) is not None]
            if news:
                return news

    def _ready(self) -> list[Notifier]:
        """Notifiers of streams that may have news; waits for the first."""
        if not self._mailbox.has_news:
            self._check()
        return self._mailbox.wait()

    def _take(self, notifier: Notifier) -> News[ChunkT] | None:
        """The news of one stream, consumed; None if there is none."""
        stream = self._streams.get(notifier)
        if stream is None:
            return None
        chunk = stream._take()
        if stream.ended:
            del self._streams[notifier]
        return News(stream, chunk, stream.ended) if chunk is not None or stream.ended else None

    def _check(self) -> None:
        """Raise RuntimeError if nothing can arrive any more."""
        for stream in self._streams.values():
            stream._owner.check()
            return
