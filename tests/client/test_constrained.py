"""`schema=` and its like: what is sent for them, and the object that comes back, from the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from tests.support.workers import WorkerProcess
from zmqengine.errors import GenerationFailed
from zmqengine.protocol.messages import Constraint
from zmqengine_client import AsyncClient
from zmqengine_client.core.constrained import json_schema
from zmqengine_client.core.options import make_options

pytest.importorskip("mlx.core")

Mood = Literal["glad", "sad"]


class PydanticPoint(BaseModel):
    x: int
    mood: Mood


class Even(BaseModel):
    x: Literal[1, 3]

    @field_validator("x")
    @classmethod
    def is_even(cls, x: int) -> int:
        if x % 2:
            raise ValueError("odd")
        return x


@dataclass
class DataPoint:
    x: Literal[1, 2]
    mood: Mood


class StructPoint(msgspec.Struct):
    x: Literal[1, 2]
    mood: Mood


PAIR = Annotated[list[StructPoint], msgspec.Meta(max_length=2)]


@pytest.fixture(scope="module")
def pico() -> Iterator[WorkerProcess]:
    """A worker with the bundled model."""
    with WorkerProcess(None, model="pico") as worker:
        with worker.client() as client:
            client.wait_ready()
        yield worker


@pytest.mark.parametrize("shape", [PydanticPoint, DataPoint, StructPoint, TypeAdapter(DataPoint), PAIR])
def test_an_object_comes_back_as_what_it_was_asked_as(pico: WorkerProcess, shape: Any) -> None:
    """Of the type itself, whichever of the kinds it is."""
    with pico.client() as client:
        point = client.generate(
            "Where is Tom?", schema=shape, max_tokens=300, temperature=0.7, seed=2
        ).read_object()
        if shape == PAIR:
            assert all(isinstance(item, StructPoint) for item in point)
            return
        assert isinstance(point, DataPoint if isinstance(shape, TypeAdapter) else shape)
        assert point.mood in ("glad", "sad")


def test_a_plain_schema_gives_dicts_and_the_other_ways_give_texts(pico: WorkerProcess) -> None:
    """In either client."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }

    async def awaited() -> Any:
        async with AsyncClient(pico.address) as client:
            return await client.generate("x", schema=schema).read_object()

    with pico.client() as client:
        assert client.generate("x", schema=schema).read_object()["ok"] in (True, False)
        assert client.generate("x", regex="[0-9]{4}").text().isdigit()
        assert client.generate("x", choice=["left", "right"]).text() in ("left", "right")
        assert client.generate("x", grammar='start: "a" "b"').text() == "ab"
    assert asyncio.run(awaited())["ok"] in (True, False)


def test_what_was_cut_is_no_object(pico: WorkerProcess) -> None:
    """Neither by max_tokens nor at a stop string; the text is still there."""
    with pico.client() as client:
        with pytest.raises(GenerationFailed, match="cut at max_tokens") as cut:
            client.generate("x", schema=DataPoint, max_tokens=3).read_object()
        assert cut.value.completion.text.startswith("{")  # type: ignore[attr-defined]
        with pytest.raises(GenerationFailed, match="cut before its end"):
            client.generate("x", schema=DataPoint, stop="mood").read_object()


def test_a_type_that_wants_more_than_its_schema_says_so_itself(pico: WorkerProcess) -> None:
    """Its own error, with its own words."""
    with pico.client() as client, pytest.raises(ValidationError, match="odd"):
        client.generate("x", schema=Even).read_object()


def test_types_say_nothing_of_members_that_they_do_not_name() -> None:
    """Objects are closed wherever one is, and values that look like schemas are left alone."""

    class Inner(BaseModel):
        default: int = 3

    class Outer(BaseModel):
        inner: list[Inner]
        word: dict[str, Any] = {"properties": {}}

    schema = json_schema(Outer)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["properties"]["word"]["default"] == {"properties": {}}
    assert json_schema({"properties": {}}) == {"properties": {}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schema": DataPoint, "regex": "a"}, "schema and regex were given together"),
        ({"choice": ["a"], "constraint": Constraint("json")}, "choice and constraint"),
        ({"choice": "abc"}, "choice is a list of texts, not str"),
        ({"regex": 3}, "regex is a text, not int"),
        ({"schema": 3}, "schema: a JSON schema, or a type"),
    ],
)
def test_what_cannot_be_meant_is_told_at_once(given: Any, said: str) -> None:
    """At the call, in words that name the options."""
    with pytest.raises(TypeError, match=said):
        make_options(given)


def test_each_way_is_a_constraint_on_the_wire() -> None:
    """The kinds of the protocol."""
    assert make_options({"regex": "a+"}).constraint == Constraint("regex", "a+")
    assert make_options({"choice": ("a", "b")}).constraint == Constraint("choice", choices=["a", "b"])
    assert make_options({"grammar": "start: X"}).constraint == Constraint("lark", "start: X")
    assert make_options({"regex": None}).constraint is None
    sent = make_options({"schema": {"type": "integer"}}).constraint
    assert sent is not None
    assert (sent.kind, json.loads(sent.text)) == ("json_schema", {"type": "integer"})
