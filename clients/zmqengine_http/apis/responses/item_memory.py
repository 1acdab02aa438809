"""The items that were made here lately, for clients that refer to them by id instead of sending them back.

The Vercel AI SDK does so by default. This is a convenience of one process, not a store: what is gone has to be sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from zmqengine_http.apis.responses.request import Item

BYTES_MAX = 32 * 1024 * 1024


class ItemMemory:
    """Items by their ids, which nobody can guess; the oldest go first. For one thread."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._items: OrderedDict[str, bytes] = OrderedDict()

    def remember(self, document: Mapping[str, object]) -> None:
        """Keep an item of a response that is being sent."""
        data = msgspec.json.encode(document)
        self._items[str(document["id"])] = data
        self._bytes += len(data)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._items.popitem(last=False)[1])

    def find(self, id_: str) -> Item | None:
        """The item of this id, as a client would have sent it."""
        data = self._items.get(id_)
        return None if data is None else msgspec.json.decode(data, type=Item)
