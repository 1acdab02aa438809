"""Recent responses and their items, for requests that refer to them instead of sending them.

A convenience of one process, bounded in bytes, and no store: the oldest are forgotten first, all of them with the
process. Each key finds its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from zmqengine_http.apis.responses.request import Item
from zmqengine_http.serving.body import OBJECTS_MAX
from zmqengine_http.serving.errors import bad_field

T = TypeVar("T")
BYTES_MAX = 32 * 1024 * 1024
"""Each memory holds some hundred turns of an agent with a long prompt."""


class OwnedMemory(Generic[T]):
    """A bounded memory of values by owner and id, the oldest first. Not thread-safe.

    Whoever holds most gives way, so that each of n owners has a share of 1/n, whatever the others store.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes: Counter[str] = Counter()
        self._values: dict[str, OrderedDict[str, tuple[T, int]]] = {}

    def add(self, owner: str, id_: str, value: T, size: int) -> None:
        """Add a value of `size` bytes, evicting the oldest ones of the owner that holds most."""
        self._values.setdefault(owner, OrderedDict())[id_] = value, size
        self._bytes[owner] += size
        while self._bytes.total() > self._bytes_max:
            most = max(self._bytes, key=self._bytes.__getitem__)
            values = self._values[most]
            self._bytes[most] -= values.popitem(last=False)[1][1]
            if not values:
                del self._values[most], self._bytes[most]

    def find(self, owner: str, id_: str) -> T | None:
        """The value of this id if it is this owner's, else None."""
        entry = self._values.get(owner, OrderedDict()).get(id_)
        return None if entry is None else entry[0]

    def forget(self, owner: str, id_: str) -> T | None:
        """Drop the owner's value of this id; returns it."""
        if self.find(owner, id_) is None:
            return None
        value, size = self._values[owner].pop(id_)
        self._bytes[owner] -= size
        if not self._values[owner]:
            del self._values[owner], self._bytes[owner]
        return value

    def renew(self, owner: str, id_: str) -> None:
        """Count a value as the newest of its owner's."""
        self._values[owner].move_to_end(id_)


class ItemMemory:
    """Output items by id, for clients that refer to an item instead of sending it back.

    The Vercel AI SDK does so by default.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._items: OwnedMemory[bytes] = OwnedMemory(bytes_max)

    def remember(self, owner: str, document: Mapping[str, object]) -> None:
        """Add an item of a response."""
        data = msgspec.json.encode(document)
        self._items.add(owner, str(document["id"]), data, len(data))

    def find(self, owner: str, id_: str) -> Item | None:
        """The owner's item of this id as a client would have sent it, or None."""
        data = self._items.find(owner, id_)
        return None if data is None else msgspec.json.decode(data, type=Item)

    def forget(self, owner: str, id_: str) -> None:
        """Drop the owner's item of this id."""
        self._items.forget(owner, id_)


class StoredResponse(Struct, frozen=True):
    """One response: the response before it, the items of its request, and its document, as JSON."""

    previous: str | None
    items: bytes
    document: bytes

    @property
    def size(self) -> int:
        """The bytes it holds."""
        return len(self.items) + len(self.document)


class ResponseMemory:
    """Responses by id, each for the key that asked for it.

    A response holds only its own turn. Reading a conversation keeps all of its turns.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._responses: OwnedMemory[StoredResponse] = OwnedMemory(bytes_max)

    def remember(
        self, owner: str, previous: str | None, items: Sequence[Item], document: Mapping[str, object]
    ) -> None:
        """Add a finished response."""
        stored = StoredResponse(previous, msgspec.json.encode(items), msgspec.json.encode(document))
        self._responses.add(owner, str(document["id"]), stored, stored.size)

    def find(self, owner: str, id_: str) -> StoredResponse | None:
        """The response of this id if this owner asked for it, else None."""
        return self._responses.find(owner, id_)

    def forget(self, owner: str, id_: str) -> list[str] | None:
        """Drop the owner's response of this id; returns the ids of its output items, or None if it is not here."""
        forgotten = self._responses.forget(owner, id_)
        if forgotten is None:
            return None
        return [item.id or "" for item in msgspec.json.decode(forgotten.document, type=_Output).output]

    def conversation(self, owner: str, id_: str) -> list[Item] | None:
        """The items of a response and of all before it, oldest first; None if any of them is not here.

        Raises a 400 for more objects than a request may bring itself: a short one must not ask for all that is here.
        """
        turns: list[list[Item]] = []
        chain: list[str] = []
        objects = 0
        at: str | None = id_
        while at is not None:
            response = self.find(owner, at)
            if response is None:
                return None
            chain.append(at)
            output = msgspec.json.decode(response.document, type=_Output).output
            turns.append(msgspec.json.decode(response.items, type=list[Item]) + output)
            objects += sum(map(_objects, turns[-1]))
            if objects > OBJECTS_MAX:
                raise bad_field(
                    "previous_response_id",
                    f"the conversation has more than the {OBJECTS_MAX} objects that are read: begin a new one",
                )
            at = response.previous
        for each in reversed(chain):
            self._responses.renew(owner, each)
        return [item for turn in reversed(turns) for item in turn]


class _Output(Struct):
    output: list[Item]


def _objects(item: Item) -> int:
    parts = (item.content, item.output, item.summary)
    return 1 + sum(len(part) for part in parts if isinstance(part, list))
