"""Recent responses and their items, for requests that refer to them instead of sending them.

A convenience of one process, bounded in bytes, and no store: the oldest are forgotten first, all of them with the
process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from zmqengine_http.apis.responses.request import Item
from zmqengine_http.serving.body import OBJECTS_MAX
from zmqengine_http.serving.errors import bad_field

BYTES_MAX = 32 * 1024 * 1024
"""Each memory holds some hundred turns of an agent with a long prompt."""


class ItemMemory:
    """A bounded FIFO of output items by id, for clients that refer to an item instead of sending it back.

    The Vercel AI SDK does so by default. Not thread-safe.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._items: OrderedDict[str, bytes] = OrderedDict()

    def remember(self, document: Mapping[str, object]) -> None:
        """Add an item of a response, evicting the oldest ones."""
        data = msgspec.json.encode(document)
        self._items[str(document["id"])] = data
        self._bytes += len(data)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._items.popitem(last=False)[1])

    def find(self, id_: str) -> Item | None:
        """The item of this id as a client would have sent it, or None."""
        data = self._items.get(id_)
        return None if data is None else msgspec.json.decode(data, type=Item)


class StoredResponse(Struct, frozen=True):
    """One response: its owner, the response before it, the items of its request, and its document, as JSON."""

    owner: str
    previous: str | None
    items: bytes
    document: bytes

    @property
    def size(self) -> int:
        """The bytes it holds."""
        return len(self.items) + len(self.document)


class ResponseMemory:
    """A bounded LRU memory of responses by id, each for the key that asked for it. Not thread-safe.

    A response holds only its own turn. Reading a conversation keeps all of its turns.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def remember(
        self, owner: str, previous: str | None, items: Sequence[Item], document: Mapping[str, object]
    ) -> None:
        """Add a finished response, evicting the ones that were not read for longest."""
        stored = StoredResponse(owner, previous, msgspec.json.encode(items), msgspec.json.encode(document))
        self._responses[str(document["id"])] = stored
        self._bytes += stored.size
        while self._bytes > self._bytes_max:
            self._bytes -= self._responses.popitem(last=False)[1].size

    def find(self, owner: str, id_: str) -> StoredResponse | None:
        """The response of this id if this owner asked for it, else None."""
        found = self._responses.get(id_)
        return found if found is not None and found.owner == owner else None

    def conversation(self, owner: str, id_: str) -> list[Item] | None:
        """The items of a response and of all before it, oldest first; None if any of them is not here.

        Raises a 400 for more objects than a request may bring itself: a short one must not ask for all that is here.
        """
        turns: list[list[Item]] = []
        chain: list[str] = []
        objects = 0
        at: str | None = id_
        while at is not None:
            found = self.find(owner, at)
            if found is None:
                return None
            chain.append(at)
            output = msgspec.json.decode(found.document, type=_Output).output
            turns.append(msgspec.json.decode(found.items, type=list[Item]) + output)
            objects += sum(map(_objects, turns[-1]))
            if objects > OBJECTS_MAX:
                raise bad_field(
                    "previous_response_id",
                    f"the conversation has more than the {OBJECTS_MAX} objects that are read: begin a new one",
                )
            at = found.previous
        for each in reversed(chain):
            self._responses.move_to_end(each)
        return [item for turn in reversed(turns) for item in turn]


class _Output(Struct):
    output: list[Item]


def _objects(item: Item) -> int:
    parts = (item.content, item.output, item.summary)
    return 1 + sum(len(part) for part in parts if isinstance(part, list))
