"""The items of a request as the list that OpenAI's API shows them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from zmqengine_http.apis.responses.request import Item
from zmqengine_http.serving.errors import bad_field

LIMIT, LIMIT_MAX = 20, 100
"""Items of one page, in OpenAI's API."""


def listed_items(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, object]:
    """A page of items by `limit`, `order` and `after`; the newest come first, as in OpenAI's API.

    Raises a 400 for another order or limit, or an `after` that is no item.
    """
    shown = [_shown(item, index) for index, item in enumerate(items)]
    if query.get("order", "desc") not in ("asc", "desc"):
        raise bad_field("order", "asc or desc")
    if query.get("order") != "asc":
        shown.reverse()
    limit = query.get("limit", str(LIMIT))
    if not limit.isdecimal() or not 1 <= int(limit) <= LIMIT_MAX:
        raise bad_field("limit", f"a number from 1 to {LIMIT_MAX}")
    ids = [str(item["id"]) for item in shown]
    start = 0
    if "after" in query:
        if query["after"] not in ids:
            raise bad_field("after", "no item of this response")
        start = ids.index(query["after"]) + 1
    page = shown[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(shown),
    }


def _shown(item: Item, place: int) -> dict[str, object]:
    """An item with an id; a text as the list of parts that clients expect."""
    plain: dict[str, object] = {
        name: value for name, value in msgspec.to_builtins(item).items() if value is not None
    }
    plain.setdefault("id", f"item_{place}")
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        plain["content"] = [{"type": kind, "text": item.content}]
    return plain
