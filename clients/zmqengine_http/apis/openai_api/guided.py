"""vLLM's fields for constrained output: `structured_outputs`, and `guided_json`, `_regex`, `_choice` and `_grammar`.

Source: https://docs.vllm.ai/en/latest/features/structured_outputs.html. A grammar is Lark here, as llguidance has it.
"""

from __future__ import annotations

import json
from typing import Annotated

from msgspec import Meta, Struct

from zmqengine.protocol.messages import CONSTRAINT_CHARS_MAX, Constraint
from zmqengine_http.serving.errors import bad_field

Text = Annotated[str, Meta(min_length=1, max_length=CONSTRAINT_CHARS_MAX)]
Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1024)
]


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of these."""

    json: dict[str, object] | Text | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    def constraint(self, param: str) -> Constraint | None:
        """As the worker takes it, or None if nothing is asked for. Raises a 400 for more than one."""
        asked = [
            Constraint("json_schema", _schema_text(self.json)) if self.json is not None else None,
            Constraint("regex", self.regex) if self.regex is not None else None,
            Constraint("choice", choices=self.choice) if self.choice is not None else None,
            Constraint("lark", self.grammar) if self.grammar is not None else None,
            Constraint("json") if self.json_object else None,
        ]
        found = [each for each in asked if each is not None]
        if len(found) > 1:
            raise bad_field(param, "ask for one of json, regex, choice, grammar and json_object")
        return found[0] if found else None


def _schema_text(schema: dict[str, object] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
