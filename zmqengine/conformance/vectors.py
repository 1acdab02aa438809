"""Rules of embed and of its vectors."""

from __future__ import annotations

import math
import struct
from typing import Any

from zmqengine.conformance.front_end import Body, FrontEnd, Reply, expect
from zmqengine.conformance.rules import Make, rule

TEXTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12]]
NEAR = 1e-3
"""Difference of two floats of a vector of length 1 that rounding alone may make, in half precision."""


def _output(front_end: FrontEnd) -> str:
    """Kind of vector that the model makes of texts; empty if none."""
    model = front_end.description["model"]
    return "embedding" if model.get("dimensions") else "score" if model.get("labels") else ""


def _embed(front_end: FrontEnd, request: str, texts: list[list[int]], **fields: Any) -> Reply:
    body = {"epoch": front_end.welcome["epoch"], "texts": texts, "output": _output(front_end)} | fields
    return front_end.command("E", request=request, **body)


def _vectors(front_end: FrontEnd, request: str, *, first: int = 0) -> tuple[list[list[float]], Body]:
    """The vectors of a request, checked to follow one another, and its end."""
    vectors: list[list[float]] = []
    while True:
        kind, frame = front_end.next_frame()
        for row in frame.get("rows", ()) if kind == "t" else ():
            if row[0] != request:
                continue
            expect(row[1] == first + len(vectors), f"expected vector {first + len(vectors)}, got {row[1]}")
            expect(not row[2], "the row of an embed has tokens")
            vectors += _floats(row)
            if row[4] is not None:
                return vectors, row[4]


def _floats(row: list[Any]) -> list[list[float]]:
    return [list(struct.unpack(f"<{len(packed) // 4}f", packed)) for packed in (row[5] or ())]


def _expect_near(vectors: list[list[float]], others: list[list[float]], otherwise: str) -> None:
    expect(len(vectors) == len(others), otherwise)
    for vector, other in zip(vectors, others, strict=True):
        expect(len(vector) == len(other), otherwise)
        expect(max(abs(a - b) for a, b in zip(vector, other, strict=True)) < NEAR, otherwise)


@rule("E embed", "a model that makes no vectors refuses it with bad_request, and announces no texts")
def _refused(make: Make) -> None:
    front_end = make().open_session()
    if not _output(front_end):
        expect(not front_end.welcome["limits"].get("texts_max"), "texts_max without vectors")
        front_end.refused(_embed(front_end, "e", TEXTS, output="embedding"), "bad_request")
    if not front_end.description["model"].get("generates", True):
        body = {"epoch": front_end.welcome["epoch"], "prompt": [5, 6, 7], "max_tokens": 8}
        front_end.refused(front_end.command("I", request="r", **body), "bad_request")


@rule("E embed", "one vector for each text in order, equal for equal texts whatever stands beside them")
def _in_order(make: Make) -> None:
    front_end = make().open_session()
    if not _output(front_end):
        return
    front_end.done(_embed(front_end, "e", TEXTS), "i")
    vectors, end = _vectors(front_end, "e")
    expect(end.get("finish") == "stop", f"it ended with {end.get('finish')!r}")
    expect(end.get("prompt_tokens") == 11, f"11 tokens of text are counted as {end.get('prompt_tokens')}")
    model = front_end.description["model"]
    width = model["dimensions"] if _output(front_end) == "embedding" else model["labels"]
    expect(all(len(vector) == width for vector in vectors), f"not every vector has {width} floats")
    _expect_near(vectors[:1], vectors[2:3], "equal texts have other vectors")
    for index, text in enumerate(TEXTS):
        front_end.done(_embed(front_end, f"alone{index}", [text]), "i")
        alone, _ = _vectors(front_end, f"alone{index}")
        _expect_near(alone, vectors[index : index + 1], "a vector depends on the texts beside it")


@rule("E embed", "embeddings have length 1, with dimensions as well")
def _length(make: Make) -> None:
    front_end = make().open_session()
    if _output(front_end) != "embedding":
        return
    whole = front_end.description["model"]["dimensions"]
    for wanted in (None, max(1, whole // 2)):
        front_end.done(_embed(front_end, f"e{wanted}", TEXTS, dimensions=wanted), "i")
        vectors, _ = _vectors(front_end, f"e{wanted}")
        for vector in vectors:
            expect(len(vector) == (wanted or whole), f"{len(vector)} floats instead of {wanted or whole}")
            expect(abs(math.hypot(*vector) - 1) < NEAR, f"a vector of length {math.hypot(*vector)}")
    front_end.refused(_embed(front_end, "more", TEXTS, dimensions=whole + 1), "bad_request")


@rule("E embed", "with first_index the vectors go on there; resume gives them from any index on")
def _goes_on(make: Make) -> None:
    front_end = make().open_session()
    if not _output(front_end):
        return
    front_end.done(_embed(front_end, "e", TEXTS), "i")
    vectors, _ = _vectors(front_end, "e")
    accepted = front_end.done(_embed(front_end, "rest", TEXTS[2:], first_index=2), "i")
    expect(accepted.get("next_index") == 2, "accepted has another next_index")
    rest, _ = _vectors(front_end, "rest", first=2)
    _expect_near(rest, vectors[2:], "the rest has other vectors")
    epoch = front_end.welcome["epoch"]
    for index in (0, 3):
        row = front_end.done(front_end.command("U", request="e", epoch=epoch, from_index=index), "u")["row"]
        expect(row[1] == index, f"from {index} on it begins at {row[1]}")
        _expect_near(_floats(row), vectors[index:], "the replay has other vectors")
        expect(row[4]["finish"] == "stop", "the end is not sent again")


@rule("E embed", "what is out of range is refused, a text that is too long with context_exceeded")
def _out_of_range(make: Make) -> None:
    front_end = make().open_session()
    if not _output(front_end):
        return
    limits, vocabulary = front_end.welcome["limits"], front_end.description["model"]["vocab_size"]
    wrong: list[tuple[list[list[int]], Body]] = [
        ([], {}),
        ([[]], {}),
        ([[vocabulary]], {}),
        ([[5]] * (limits["texts_max"] + 1), {}),
        ([[5]], {"second": [1]}),
        ([[5]], {"priority": 101}),
    ]
    for texts, fields in wrong:
        front_end.refused(_embed(front_end, "e", texts, **fields), "bad_request")
    unknown = front_end.refused(_embed(front_end, "e", [[5]], pooling="max"), "bad_request")
    expect("pooling" in unknown["message"], "the message does not name the key")
    too_long = [[5] * (limits["context_tokens_max"] + 1)]
    front_end.refused(_embed(front_end, "e", too_long), "context_exceeded")


@rule("E embed", "an abort ends it; sent again it is the same request, with other texts a conflict")
def _one_request(make: Make) -> None:
    front_end = make().open_session()
    if not _output(front_end):
        return
    front_end.done(_embed(front_end, "e", TEXTS), "i")
    front_end.done(_embed(front_end, "e", TEXTS), "i")
    front_end.refused(_embed(front_end, "e", TEXTS[1:]), "conflict")
    front_end.done(front_end.command("A", request="e"))
    _, end = _vectors(front_end, "e")
    expect(end.get("finish") in ("abort", "stop"), f"it ended with {end.get('finish')!r}")
    front_end.done(front_end.command("A", request="later"))
    front_end.refused(_embed(front_end, "later", TEXTS), "aborted")
