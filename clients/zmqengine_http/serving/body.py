"""Decodes and validates a request body into a struct. Every refusal is a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Struct

from zmqengine_http.serving.errors import ApiError, bad_field, from_validation

RequestT = TypeVar("RequestT", bound=Struct)
OBJECTS_MAX = 32_768
"""Objects and lists within the lists of a field: messages, items or tools with the parts of their contents and their
calls. Some 50 ms of the event loop; a context of a million tokens is full with that many turns."""
MEMBERS_MAX = 8 * OBJECTS_MAX
"""Members of the objects in a field, at any depth, and texts in its lists. Of a whole body: its objects and lists, its
members, a third of its texts (names are among them), and escaped surrogates of one with half a pair."""
VALUES_MAX = 1 << 21
"""Values of a whole body in lists and objects: token ids of two contexts of a million, 100 ms of the event loop."""
_NO_MARKS = bytes(set(range(256)) - set(b'{[:,"'))
_PAIR_BYTES = len(rb"\ud83d\ude00")
_SURROGATES = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[c-fC-F][0-9a-fA-F]{2})"
)


class Field(NamedTuple):
    """A known field that is not in the struct.

    refused: a 400 that names it, unless its value is null or `neutral`, which asks for nothing. ignored:
    accepted without effect, because it cannot change the response. reported: accepted without effect, and named in a
    header of the response. foreign: refused, or reported where unknown fields are ignored.
    """

    name: str
    fate: Literal["refused", "ignored", "reported", "foreign"]
    note: str = ""
    neutral: tuple[object, ...] = ()


def refused(name: str, note: str = "", *neutral: object) -> Field:
    """A field that is a 400 unless it has a neutral value."""
    return Field(name, "refused", note, neutral)


def ignored(name: str, note: str) -> Field:
    """A field that is accepted and has no effect."""
    return Field(name, "ignored", note)


def reported(name: str, note: str, *neutral: object) -> Field:
    """A field that is accepted, has no effect, and is named in the response's header unless it has a neutral value."""
    return Field(name, "reported", note, neutral)


def foreign(name: str, note: str = "", *neutral: object) -> Field:
    """A field of other servers that changes their output: as unknown as any other, unless it has a neutral value."""
    return Field(name, "foreign", note, neutral)


class ReadBody(Struct, Generic[RequestT], frozen=True):
    """A decoded request, the names of fields without effect that are reported to the client, and the number of unknown
    keys inside other fields."""

    request: RequestT
    ignored: list[str]
    unknown_inside: int


class Body(Generic[RequestT]):
    """The schema of a body: `kind` is the struct of the supported fields, `fields` are other known ones.

    A null counts as absent. An unknown field is a 400 that names it, or ignored with `unknown_ignored`.
    `translate` may rename fields of the document before they are looked up, and returns by which names the client
    sent them; `synonyms` are those that it knows; `prepare` may modify it before conversion; `check` raises `ApiError`
    for constraints that the struct cannot express.
    """

    def __init__(
        self,
        kind: type[RequestT],
        fields: Sequence[Field] = (),
        *,
        synonyms: Mapping[str, str] = {},
        translate: Callable[[dict[str, object]], Mapping[str, str]] = lambda body: {},
        prepare: Callable[[dict[str, object]], None] = lambda body: None,
        check: Callable[[RequestT], None] = lambda request: None,
        unknown_ignored: bool = False,
    ) -> None:
        self.kind = kind
        self.fields = {field.name: field for field in fields}
        self.synonyms = synonyms
        self._translate = translate
        self._prepare = prepare
        self._check = check
        self.unknown_ignored = unknown_ignored
        # Computed once: every field of every request is looked up.
        self._supported = frozenset(self.supported)
        types = {field.name: msgspec.inspect.type_info(field.type) for field in msgspec.structs.fields(kind)}
        self._whole_numbers = frozenset(name for name, type_ in types.items() if _is_whole(type_))
        self._open = tuple(name for name, type_ in types.items() if _takes_unknown(type_))

    @property
    def supported(self) -> tuple[str, ...]:
        """The names of the supported fields: honoured, or refused with the reason."""
        return self.kind.__struct_fields__

    def read(self, data: bytes, *, ignore_unknown: bool = False) -> ReadBody[RequestT]:
        """Decode a body. Raises a 400 that names the invalid field."""
        return self.read_document(json_object(data), ignore_unknown=ignore_unknown)

    def read_document(self, given: dict[str, object], *, ignore_unknown: bool = False) -> ReadBody[RequestT]:
        """Convert a decoded body, which may be modified. Raises a 400 that names the invalid field."""
        sent = self._translate(given)
        body, ignored = self._accepted(given, ignore_unknown or self.unknown_ignored)
        self._prepare(body)
        try:
            request = msgspec.convert(body, self.kind)
            self._check(request)
        except msgspec.ValidationError as error:
            raise from_validation(error).about(sent) from None
        except ApiError as error:
            raise error.about(sent) from None
        unknown_inside = sum(
            count_unknown(body[name], getattr(request, name)) for name in self._open if name in body
        )
        return ReadBody(request, ignored, unknown_inside)

    def _accepted(self, body: dict[str, object], ignore_unknown: bool) -> tuple[dict[str, object], list[str]]:
        accepted: dict[str, object] = {}
        ignored = []
        supported, whole_numbers = self._supported, self._whole_numbers
        for name, value in body.items():
            if name in supported:
                if value is not None:
                    accepted[name] = _whole(value) if name in whole_numbers else value
                continue
            field = self.fields.get(name)
            if field is None:
                if not ignore_unknown:
                    raise _unknown(name)
                ignored.append(name)
                continue
            asks_for_nothing = value is None or any(
                type(value) is type(neutral) and value == neutral for neutral in field.neutral
            )
            if asks_for_nothing or field.fate == "ignored":
                continue
            if field.fate == "reported" or (field.fate == "foreign" and ignore_unknown):
                ignored.append(name)
            else:
                hint = f": {field.note}" if field.note else ""
                raise ApiError(
                    400, f"{name} is not supported by this server{hint}",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        return accepted, ignored


def count_unknown(document: object, value: object) -> int:
    """The number of keys of a document that are not in the struct it was converted to, at any depth."""
    if isinstance(value, Struct) and isinstance(document, dict):
        fields, tag = value.__struct_fields__, value.__struct_config__.tag_field
        count = 0
        for name, item in document.items():
            if name not in fields:
                count += name != tag
            elif isinstance(item, (dict, list)):
                count += count_unknown(item, getattr(value, name))
        return count
    if isinstance(value, (list, tuple)) and isinstance(document, list):
        return sum(map(count_unknown, document, value))
    return 0


def _whole(value: object) -> object:
    """Convert 2.0 to 2: JavaScript and Lua have one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.IntType) for each in kinds) and not any(
        isinstance(each, msgspec.inspect.FloatType) for each in kinds
    )


def _takes_unknown(kind: msgspec.inspect.Type) -> bool:
    """Whether values of this type may have unknown keys."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _takes_unknown(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_takes_unknown, kind.types))
    if isinstance(kind, msgspec.inspect.ListType):
        return _takes_unknown(kind.item_type)
    if isinstance(kind, msgspec.inspect.StructType):
        return not kind.forbid_unknown_fields or any(_takes_unknown(field.type) for field in kind.fields)
    return False


def without_nulls(value: object) -> object:
    """A mapping without its nulls; any other value unchanged."""
    return (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
    )


def _unknown(name: str) -> ApiError:
    shown = name if name.isprintable() and len(name) <= 100 else repr(name[:100])
    return ApiError(
        400, f"Unrecognized request argument supplied: {shown}", param=shown, code="unknown_parameter"
    )


def json_object(data: bytes) -> dict[str, object]:
    """The JSON object in a body. Raises a 400 for any other body.

    A lone surrogate, which JavaScript clients make by cutting a string, becomes U+FFFD.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    # A body of so few bytes has no more of anything.
    marks = data.translate(None, _NO_MARKS) if len(data) > OBJECTS_MAX else b""
    # Marks in texts count here too, so that only bodies near the bounds are looked through.
    nested, quotes = marks.count(b"{") + marks.count(b"["), marks.count(b'"')
    if (
        nested > MEMBERS_MAX
        or quotes > 6 * MEMBERS_MAX
        or marks.count(b":") > MEMBERS_MAX
        or marks.count(b",") > VALUES_MAX
    ):
        _check_structure(data)
    try:
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            if b"\\ud" not in data and b"\\uD" not in data:
                raise
            body = msgspec.json.decode(_without_half_pairs(data))
    except UnicodeDecodeError:
        raise _not_utf8(data) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:500], code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if nested > OBJECTS_MAX or quotes > 2 * MEMBERS_MAX:
        for name, value in body.items():
            _check_size(name, value)
    return body


def _check_structure(data: bytes) -> None:
    """Raise a 400 for a body of too many values, before an object is made for each: 15 MB of them take a second."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_count(bare.count(b'"') // 2, 3 * MEMBERS_MAX, "texts")
    outside = b"".join(bare.split(b'"')[::2])
    _check_count(outside.count(b"{") + outside.count(b"["), MEMBERS_MAX, "objects and lists")
    _check_count(outside.count(b":"), MEMBERS_MAX, "members")
    _check_count(outside.count(b","), VALUES_MAX, "values")


def _check_count(count: int, most: int, of: str) -> None:
    if count > most:
        raise ApiError(
            400,
            f"the body has {count} {of}, more than the {most} that are read: send fewer",
            code="invalid_value",
        )


def _check_size(name: str, value: object) -> None:
    """Raise a 400 for a field of too many objects or members, before each of them is read."""
    objects, members, left = 0, 0, [value]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            members += len(node)
            left += [each for each in node.values() if isinstance(each, (dict, list))]
        elif isinstance(node, list):
            inside = [each for each in node if isinstance(each, (dict, list))]
            objects += len(inside)
            members += sum(isinstance(each, str) for each in node)
            left += inside
        for count, most, of in ((objects, OBJECTS_MAX, "objects"), (members, MEMBERS_MAX, "members")):
            if count > most:
                raise bad_field(name, f"{count} {of} are more than the {most} that are read: send fewer")


def _not_utf8(data: bytes) -> ApiError:
    try:
        data.decode()
        place = ""
    except UnicodeDecodeError as error:
        place = f" at byte {error.start}"
    return ApiError(400, f"the body is not valid JSON: it is not UTF-8{place}", code="invalid_json")


def _without_half_pairs(data: bytes) -> bytes:
    _check_count(data.count(rb"\ud") + data.count(rb"\uD"), MEMBERS_MAX, "escaped surrogates")
    # Without escaped backslashes every backslash begins an escape.
    data = data.replace(rb"\\", rb"\u005c")
    return _SURROGATES.sub(lambda found: found[0] if len(found[0]) == _PAIR_BYTES else rb"\ufffd", data)
