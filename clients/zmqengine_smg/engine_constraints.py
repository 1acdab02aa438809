"""`structured_outputs` of the ZeroMQ wire as a constraint of the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from zmqengine.protocol.messages import Constraint
from zmqengine_client import Options
from zmqengine_client.errors import BadRequest
from zmqengine_smg.refusals import refused


def _schema(value: Any) -> Constraint:
    return Constraint("json_schema", value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _grammar(value: Any) -> Constraint:
    if "::=" in value:
        raise BadRequest("structured_outputs.grammar: EBNF is not known here; give a Lark grammar")
    return Constraint("lark", value)


_KINDS: dict[str, Callable[[Any], Constraint]] = {
    "json": _schema,
    "json_object": lambda value: Constraint("json"),
    "regex": lambda value: Constraint("regex", value),
    "choice": lambda value: Constraint("choice", choices=list(value)),
    "grammar": _grammar,
}


def constraint_options(wanted: Mapping[str, Any]) -> Options:
    """The options of one constraint such as {"json": SCHEMA}.

    What is off asks for nothing; names with an underscore are the gateway's notes to itself. Raises `BadRequest` with
    the name of another kind, or of an option of one. Whether the worker can follow a constraint it says itself.
    """
    asked = {name: value for name, value in wanted.items() if value and not name.startswith("_")}
    unknown = [name for name in asked if name not in _KINDS]
    if unknown:
        raise refused(f"structured_outputs.{unknown[0]}")
    if len(asked) != 1:
        raise BadRequest(f"structured_outputs: give one constraint, not {len(asked)}")
    ((name, value),) = asked.items()
    return Options(constraint=_KINDS[name](value))
