"""Server-sent events with names, as two of the APIs stream them."""

from __future__ import annotations

import json
from typing import Any


def events(data: bytes) -> list[dict[str, Any]]:
    """The documents of a stream; each says in `type` what its `event:` line says."""
    found = []
    for block in data.decode().split("\n\n"):
        if not block:
            continue
        first, second = block.split("\n")
        document = json.loads(second.removeprefix("data: "))
        assert first == f"event: {document['type']}"
        found.append(document)
    return found


def types(data: bytes) -> list[str]:
    """Their types, in order, neighbours of one type as one."""
    names = [event["type"] for event in events(data)]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]
