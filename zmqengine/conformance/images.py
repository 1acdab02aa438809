"""Rules of images: sent by contents, held for a scope, seen by the request that names them."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from zmqengine.conformance.front_end import Body, FrontEnd, Reply, expect
from zmqengine.conformance.rules import Make, rule


def _card(front_end: FrontEnd) -> Body:
    """The vision card of the worker; empty if its model sees nothing."""
    return front_end.done(front_end.ask("Z"), "z").get("vision") or {}


def _reads_tiles(card: Body) -> bool:
    """Whether all grids are tiles, by the rule for the size."""
    return card.get("resize") in ("fixed", "tiles", "tiles_ratio")


class _Image:
    """An image with pixels of one value, as the page says how to name and place it: of two cells, or of one tile where
    the model reads tiles alone. `features`: its number of them."""

    def __init__(self, card: Body, value: int, *, is_tile: bool | None = None) -> None:
        self.card = card
        merge, tile = card["merge"], card.get("tile", 0) // card["patch"]
        self.grids = [
            [tile, tile] if (_reads_tiles(card) if is_tile is None else is_tile) else [merge, 2 * merge]
        ]
        patches = self.grids[0][0] * self.grids[0][1]
        self.features = patches // merge**2
        self.pixels = bytes([value]) * (patches * 3 * card["patch"] ** 2)
        kind = card["kind"].encode()
        named = struct.pack("<I", len(kind)) + kind + struct.pack("<III", 1, *self.grids[0])
        self.hash = hashlib.blake2b(named + self.pixels, digest_size=16).digest()

    def put(self, front_end: FrontEnd, **other: Any) -> Reply:
        body = {
            "epoch": front_end.welcome["epoch"],
            "hash": self.hash,
            "grids": self.grids,
            "pixels": self.pixels,
        }
        return front_end.command("G", **(body | other))

    def insert(self, front_end: FrontEnd, request: str, **fields: Any) -> Reply:
        prompt = [5, 6, *[self.card["token"]] * self.features, 7]
        body = {"images": [[self.hash, 2, self.features, self.grids]], "seed": 1}
        return front_end.insert(request, prompt, **(body | fields))


@rule("G image", "a model that sees nothing refuses images with bad_request, and announces none")
def _refused(make: Make) -> None:
    front_end = make().open_session()
    if _card(front_end):
        return
    expect(not front_end.welcome["limits"].get("images_max"), "images_max without a vision card")
    image = _Image({"kind": "none", "patch": 2, "merge": 1, "token": 5}, 0)
    front_end.refused(image.put(front_end), "bad_request")
    front_end.refused(image.insert(front_end, "r"), "bad_request")


@rule("G image", "an image that is not held is wanted by its hash; once it is sent, the request is accepted")
def _wanted(make: Make) -> None:
    front_end = make().open_session()
    card = _card(front_end)
    if not card:
        return
    image = _Image(card, 17)
    refusal = front_end.refused(image.insert(front_end, "r", cache_scope="session"), "image_wanted")
    expect(refusal.get("wanted") == [image.hash], "`wanted` does not have the hash")
    for _ in range(2):
        front_end.done(image.put(front_end, cache_scope="session"))
    front_end.done(image.insert(front_end, "r", cache_scope="session"), "i")
    tokens, end = front_end.read("r")
    expect(end.get("finish") == "length", f"it ended with {end.get('finish')!r}")
    expect(
        end.get("prompt_tokens") == 3 + image.features,
        "the image's tokens are not counted as tokens of the prompt",
    )
    front_end.done(image.insert(front_end, "again", cache_scope="session"), "i")
    again, _ = front_end.read("again")
    expect(again == tokens, "the same image gives other tokens")
    front_end.done(image.insert(front_end, "rest", cache_scope="session", emitted=tokens[:3]), "i")
    rest, _ = front_end.read("rest", start=3)
    expect(rest == tokens[3:], "with emitted it goes on differently")


@rule("G image", "who knows a hash has not seen the image: another session does not find it")
def _scoped(make: Make) -> None:
    owner, other = make().open_session(), make().open_session()
    card = _card(owner)
    if not card:
        return
    image = _Image(card, 91)
    owner.done(image.put(owner, cache_scope="session"))
    other.refused(image.insert(other, "r", cache_scope="session"), "image_wanted")
    owner.done(image.insert(owner, "r", cache_scope="session"), "i")


@rule("G image", "what does not fit its hash, its grids or its prompt is refused with bad_request")
def _wrong(make: Make) -> None:
    front_end = make().open_session()
    card = _card(front_end)
    if not card:
        return
    image = _Image(card, 3)
    front_end.refused(image.put(front_end, pixels=image.pixels[1:]), "bad_request")
    front_end.refused(image.put(front_end, hash=bytes(16)), "bad_request")
    front_end.refused(image.put(front_end, pixels=b""), "bad_request")
    front_end.refused(image.put(front_end, colour="blue"), "bad_request")
    front_end.done(image.put(front_end))
    if _reads_tiles(card):
        front_end.refused(_Image(card, 3, is_tile=False).put(front_end), "bad_request")
    limit, count = front_end.welcome["limits"]["images_max"], image.features
    for rows in (
        [[image.hash, 1, count, image.grids]],
        [[image.hash, 2, count + 7, image.grids]],
        [[image.hash, 2, count, [[card["merge"], card["merge"]]]]],
        [[image.hash, 2, count, image.grids]] * 2,
        [[image.hash, 2, count, image.grids]] * (limit + 1),
    ):
        front_end.refused(image.insert(front_end, "r", images=rows), "bad_request")
    ends = [5, *[card["token"]] * count]
    at_the_end = {"images": [[image.hash, 1, count, image.grids]]}
    front_end.refused(front_end.insert("r", ends, **at_the_end), "bad_request")
