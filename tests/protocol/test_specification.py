"""The page and the code say the same."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from msgspec import inspect

from tests.protocol import specification
from zmqengine import errors
from zmqengine.protocol import codec, launcher, messages
from zmqengine.sampling_params import Sampling

DECODERS = {
    "command": codec.command_decoder(),
    "command_reply": codec.command_reply_decoder(),
    "output": codec.output_decoder(),
    "control": codec.control_decoder(),
    "control_reply": codec.control_reply_decoder(),
    "launcher": launcher.launcher_decoder(),
    "launcher_reply": launcher.launcher_reply_decoder(),
}
# Any bound as wide as these is "uint" in the tables; the page states both once, under Frames.
GENERAL_BOUNDS = {messages.TOKEN_ID_MAX, 2**63 - 1}
STATED_IN_PROSE = {"call", "request", "protocol"}


def test_the_page_describes_the_version_that_the_code_speaks() -> None:
    """The title, the last section and PROTOCOL_VERSION agree."""
    title = re.match(r"# ZE(\d+): .*, version (\d+)\n", specification.TEXT)
    assert title
    assert [int(title[1]), int(title[2])] == [messages.PROTOCOL_VERSION] * 2
    assert f"ZE{messages.PROTOCOL_VERSION}".encode() == messages.MAGIC
    assert f"This page describes version {messages.PROTOCOL_VERSION}." in specification.TEXT


def test_the_table_of_sockets_names_what_each_carries() -> None:
    """By the name that the page gives each type byte."""
    named = re.findall(r"`(\w)` (?:\*\*)?([a-z]+(?: frame)?)", specification.TEXT)
    names = {(kind, name) for kind, name in named if kind in specification.KINDS}
    for socket, *_, carries in specification.table("socket"):
        union = {"ctl": messages.ControlRequest, "cmd": messages.Command, "out": messages.Output}[socket]
        carried = {name.removesuffix("s") if socket == "out" else name for name in carries.split(", ")}
        for cls in get_args(union):
            assert any(kind.encode() == cls.KIND and name in carried for kind, name in names), cls
        assert len(carried) == len(get_args(union))


def test_every_message_has_an_example() -> None:
    """Nothing can be sent of which the page shows no body."""
    shown = {kind for kind, _ in specification.examples()}
    assert shown == set(specification.KINDS)


def test_no_two_messages_of_a_socket_share_a_type_byte() -> None:
    """A header names one message."""
    for name, union in specification.UNIONS.items():
        kinds = [cls.KIND for cls in get_args(union)]
        assert len(set(kinds)) == len(kinds), name


@pytest.mark.parametrize(("kind", "body"), specification.examples())
def test_an_example_packed_elsewhere_is_decoded_and_packed_again_the_same(
    kind: str, body: dict[str, Any]
) -> None:
    """Another msgpack library's bytes are understood, and ours by it; defaults may be left out on the way."""
    frames = [b"ZE1" + kind.encode(), msgpack.packb(body)]
    readers = [name for name, union in specification.UNIONS.items() if _knows(union, kind)]
    assert readers
    for name in readers:
        message = DECODERS[name].decode(frames)  # type: ignore[attr-defined]
        header, packed = codec.encode(message)  # type: ignore[arg-type]
        assert header == frames[0]
        assert DECODERS[name].decode([header, packed]) == message  # type: ignore[attr-defined]
        _assert_holds(msgpack.unpackb(packed, strict_map_key=False), body, specification.KINDS[kind])


def _knows(union: object, kind: str) -> bool:
    return any(kind.encode() == cls.KIND for cls in get_args(union))


def _assert_holds(packed: dict[str, Any], body: dict[str, Any], cls: type[messages.Message]) -> None:
    """Every key of the example is in the packed body, unless it was a default, and nothing else is."""
    defaults = {field.name: _default(field) for field in msgspec.structs.fields(cls)}
    for key, value in body.items():
        assert packed.get(key, defaults.get(key)) == _as_packed(value, packed.get(key)), key
    assert set(packed) <= set(body)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _as_packed(value: Any, packed: Any) -> Any:
    """Rows may gain their trailing defaults and parts lose theirs; compare what both sides state."""
    if isinstance(value, list) and isinstance(packed, list):
        paired = [_as_packed(inner, other) for inner, other in zip(value, packed, strict=False)]
        return paired + packed[len(value) :]
    if isinstance(value, dict) and isinstance(packed, dict):
        return {
            key: _as_packed(value.get(key), packed[key]) if key in value else packed[key] for key in packed
        }
    return value


@pytest.mark.parametrize("cls", specification.message_classes(), ids=lambda cls: cls.__name__)
def test_every_field_is_named_in_the_paragraph_of_its_message(cls: type[messages.Message]) -> None:
    """No field of the code is missing from the page."""
    text = specification.paragraphs(cls.KIND.decode())
    quoted = re.findall(r"`([^`]+)`", text) + re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
    assert set(cls.__struct_fields__) <= set(re.findall(r"\w+", " ".join(quoted)))


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("### `H` hello", messages.Hello),
        ("### `I` insert", messages.Insert),
        ("### `E` embed", messages.Embed),
        ("`sampling`, applied in this order", Sampling),
    ],
)
def test_a_field_table_has_the_types_bounds_and_defaults_of_the_code(
    heading: str, cls: type[msgspec.Struct]
) -> None:
    """Row by row: what the page allows is what the decoder allows."""
    rows = {
        name: notation
        for names, notations, *_ in specification.table("field", after=heading)
        for name, notation in zip(names.split(", "), _notations(names, notations), strict=True)
    }
    fields = {field.name: field for field in msgspec.structs.fields(cls)}
    assert set(rows) == set(fields)
    for name, notation in rows.items():
        _assert_notation(notation, inspect.type_info(fields[name].type), fields[name])


def _notations(names: str, notations: str) -> list[str]:
    return notations.split(", ") if ", " in names else [notations]


def _assert_notation(notation: str, described: Any, field: Any) -> None:
    """`notation` is, for example, `float > 0, <= 1 = 1` or `[token id] = [], <= 128` or `uint <= 20, nil`."""
    nil = notation.endswith(", nil")
    if isinstance(described, inspect.Metadata):
        described = described.type
    if isinstance(described, inspect.UnionType):
        assert nil, field.name
        (described,) = (kind for kind in described.types if not isinstance(kind, inspect.NoneType))
    assert (field.default is None) == nil, field.name
    default = re.search(r" = (\S+?)(?:,|$)", notation)
    if default:
        value = _default(field)
        stated = {"{}": {}, "[]": [], "false": False, "true": True}.get(default[1])
        if isinstance(value, msgspec.Struct):
            assert value == type(value)()
        elif isinstance(value, str):
            assert value == default[1].strip('"'), field.name
        else:
            assert value == (float(default[1]) if stated is None else stated), field.name
    else:
        assert nil or field.required, field.name
    if field.name in STATED_IN_PROSE:
        return
    stated, enforced = _bounds_of(notation), _bounds_in(described)
    if "le" not in stated and enforced.get("le") in GENERAL_BOUNDS:
        del enforced["le"]
    assert stated == enforced, (field.name, notation)


def _bounds_of(notation: str) -> dict[str, float]:
    """The bounds that the page states: of a number its value, of a text or list its length."""
    text = re.sub(r"\{.*?\}|\[.*?\]", "", notation)
    text = re.sub(r" = \S+?(?=,|$)", "", text)
    found: dict[str, float] = {}
    for sign, number in re.findall(r"(>=|<=|>|<) (2\^63|-?[\d.]+)", text):
        value = 2**63 if number == "2^63" else float(number)
        found[{">=": "ge", "<=": "le", ">": "gt", "<": "lt"}[sign]] = value
    for low, high in re.findall(r"(-?\d+)(?:\.\.| to )(-?\d+)", text):
        found.update(ge=float(low), le=float(high))
    exact = re.search(r"bytes (\d+)$", text)
    if exact:
        found.update(ge=float(exact[1]), le=float(exact[1]))
    if notation.startswith("uint"):
        found.setdefault("ge", 0.0)
    if "lt" in found and not notation.startswith("float"):
        found["le"] = found.pop("lt") - 1
    return found


def _bounds_in(described: Any) -> dict[str, float]:
    if isinstance(described, inspect.IntType | inspect.FloatType):
        bounds = {name: getattr(described, name) for name in ("ge", "gt", "le", "lt")}
    else:
        bounds = {"ge": getattr(described, "min_length", None), "le": getattr(described, "max_length", None)}
    return {name: value for name, value in bounds.items() if value is not None}


def test_the_rejection_codes_are_those_of_the_errors() -> None:
    """Each code is an error that a client can catch, and no error that a worker answers is left out."""
    codes = [row[0] for row in specification.table("code")]
    assert len(set(codes)) == len(codes)
    never_rejections = {"error", "worker_lost", "timeout"}
    only_finishes = set(get_args(messages.Finish)) - {errors.DeadlineExceeded.code}
    assert set(codes) == set(errors.BY_CODE) - never_rejections - only_finishes


def test_the_finishes_are_those_of_the_code() -> None:
    """The table of finishes is the type of `End.finish`; the failures among them are errors of that code."""
    finishes = [row[0] for row in specification.table("finish")]
    assert tuple(finishes) == get_args(messages.Finish)
    failures = {cls.code for cls in errors.GenerationFailed.__subclasses__()} | {errors.RowFailed.code}
    assert failures == set(finishes) - {"stop", "length", "abort"}


def test_the_stated_limits_are_those_of_the_code() -> None:
    """Bounds in running text."""
    assert "16 MiB at the most by default; 64 KiB on ctl" in specification.TEXT
    assert messages.FRAME_BYTES_MAX == 16 * 2**20
    assert "worker at most 64 MiB" in specification.TEXT
    assert codec.REPLY_BYTES_MAX == 64 * 2**20
    assert f"1 to {messages.REQUEST_ID_CHARS_MAX} characters" in specification.TEXT
    assert messages.TOKEN_ID_MAX == 2**31 - 1
    for state in (messages.WorkerState, messages.RequestState):
        for word in get_args(state):
            assert f"`{word}`" in specification.TEXT


def test_a_request_cannot_ask_for_another_model() -> None:
    """mlx-lm #1776, #1892, omlx #1970: switching models corrupted caches; a worker has one, and insert names none. An
    adapter switches nothing: it adds to the products of its own row."""
    assert not [name for name in messages.Insert.__struct_fields__ if "model" in name]
