"""From the bytes of a request's body to a checked struct. Every refusal is a 400 that names the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec
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


class Body(Generic[RequestT]):
    """How a body is read: `kind` is the struct of the supported fields, `fields` are known ones besides.

    A null is the same as leaving the field out; any other field is a 400 that names it, or with `unknown_ignored` is
    not looked at. `prepare` may change the
    document before it is converted, `check` raises `ApiError` for what the struct cannot say.
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

    @property
    def supported(self) -> tuple[str, ...]:
        """The names of the fields that are honoured, or a 400 that says why not."""
        return self.kind.__struct_fields__

    def read(self, data: bytes) -> RequestT:
        """The request in a body. Raises a 400 that names the field at fault."""
        body = self._accepted(_json_object(data))
        self._prepare(body)
        try:
            request = msgspec.convert(body, self.kind)
        except msgspec.ValidationError as error:
            raise from_validation(error) from None
        self._check(request)
        return request

    def _accepted(self, body: dict[str, object]) -> dict[str, object]:
        accepted: dict[str, object] = {}
        for name, value in body.items():
            if name in self.supported:
                if value is not None:
                    accepted[name] = value
                continue
            field = self.fields.get(name)
            if field is None and self._unknown_ignored:
                continue
            if field is None:
                raise _unknown(name)
            asks_for_nothing = value is None or any(
                type(value) is type(neutral) and value == neutral for neutral in field.neutral
            )
            if field.fate == "refused" and not asks_for_nothing:
                hint = f": {field.note}" if field.note else ""
                raise ApiError(
                    400, f"{name} is not supported by this server{hint}",
                    param=name, code="unsupported_parameter",
                )  # fmt: skip
        return accepted


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


def _json_object(data: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body
