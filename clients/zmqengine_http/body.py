"""From the bytes of a request's body to a checked struct. Every refusal is a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Struct

from zmqengine_http.errors import ApiError, from_validation

RequestT = TypeVar("RequestT", bound=Struct)


class Field(NamedTuple):
    """A field that is known and has no part in the struct.

    refused: a 400 that names it, unless it has a `neutral` value, which asks for nothing. ignored: accepted and
    without effect, because it changes nothing of the answer.
    """

    name: str
    fate: Literal["refused", "ignored"]
    note: str = ""
    neutral: tuple[object, ...] = ()


def refused(name: str, note: str = "", *neutral: object) -> Field:
    """A field that is a 400 but for its neutral values."""
    return Field(name, "refused", note, neutral)


def ignored(name: str, note: str) -> Field:
    """A field that is taken and has no effect."""
    return Field(name, "ignored", note)


@dataclass(frozen=True)
class ReadBody(Generic[RequestT]):
    """A request, the names of the fields that were not looked at, and how many unknown keys were inside of others."""

    request: RequestT
    ignored: list[str]
    unknown_inside: int


class Body(Generic[RequestT]):
    """How a body is read: `kind` is the struct of the supported fields, `fields` are known ones besides.

    A null is the same as leaving the field out; any other field is a 400 that names it, or with `unknown_ignored` is
    not looked at. `prepare` may change the document before it is converted, `check` raises `ApiError` for what the
    struct cannot say.
    """

    def __init__(
        self,
        kind: type[RequestT],
        fields: Sequence[Field] = (),
        *,
        prepare: Callable[[dict[str, object]], None] = lambda body: None,
        check: Callable[[RequestT], None] = lambda request: None,
        unknown_ignored: bool = False,
    ) -> None:
        self.kind = kind
        self.fields = {field.name: field for field in fields}
        self._prepare = prepare
        self._check = check
        self._unknown_ignored = unknown_ignored
        self._whole_numbers = frozenset(
            field.name
            for field in msgspec.structs.fields(kind)
            if _is_whole(msgspec.inspect.type_info(field.type))
        )

    @property
    def supported(self) -> tuple[str, ...]:
        """The names of the fields that are honoured, or a 400 that says why not."""
        return self.kind.__struct_fields__

    def read(self, data: bytes, *, ignore_unknown: bool = False) -> ReadBody[RequestT]:
        """The request in a body. Raises a 400 that names the field at fault."""
        body, ignored = self._accepted(json_object(data), ignore_unknown or self._unknown_ignored)
        self._prepare(body)
        try:
            request = msgspec.convert(body, self.kind)
        except msgspec.ValidationError as error:
            raise from_validation(error) from None
        self._check(request)
        return ReadBody(request, ignored, count_unknown(body, request))

    def _accepted(self, body: dict[str, object], ignore_unknown: bool) -> tuple[dict[str, object], list[str]]:
        accepted: dict[str, object] = {}
        ignored = []
        for name, value in body.items():
            if name in self.supported:
                if value is not None:
                    accepted[name] = _whole(value) if name in self._whole_numbers else value
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
            if field.fate == "refused" and not asks_for_nothing:
                hint = f": {field.note}" if field.note else ""
                raise ApiError(
                    400, f"{name} is not supported by this server{hint}",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        return accepted, ignored


def count_unknown(document: object, value: object) -> int:
    """How many keys of a document have no part in what it was converted to."""
    if isinstance(value, Struct) and isinstance(document, dict):
        tag = value.__struct_config__.tag_field
        inside: list[int] = [
            count_unknown(document[name], getattr(value, name))
            for name in value.__struct_fields__
            if name in document
        ]
        here = [name for name in document if name not in value.__struct_fields__ and name != tag]
        return sum(inside) + len(here)
    if isinstance(value, (list, tuple)) and isinstance(document, list):
        return sum(map(count_unknown, document, value))
    return 0


def _whole(value: object) -> object:
    """2.0 as 2: JavaScript and Lua have one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_whole(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.IntType) for each in kinds) and not any(
        isinstance(each, msgspec.inspect.FloatType) for each in kinds
    )


def without_nulls(value: object) -> object:
    """A mapping without its nulls; anything else as it is."""
    return (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
    )


def _unknown(name: str) -> ApiError:
    shown = name if name.isprintable() and len(name) <= 100 else repr(name[:100])
    return ApiError(
        400, f"Unrecognized request argument supplied: {shown}", param=shown, code="unknown_parameter"
    )


def json_object(data: bytes) -> dict[str, object]:
    """The JSON object in a body. Half a surrogate pair, which JavaScript clients make by cutting a string, is U+FFFD.

    Raises a 400 for anything else.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            if b"\\ud" not in data and b"\\uD" not in data:
                raise
            body = msgspec.json.decode(_without_half_pairs(data))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}"[:500], code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _without_half_pairs(data: bytes) -> bytes:
    text = json.dumps(json.loads(data), ensure_ascii=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
