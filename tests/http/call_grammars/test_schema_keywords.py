"""What the front-end tells of a schema that is not insisted on, against what the worker's grammars leave out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.grammar_walker import GrammarWalker
from tests.support.tool_schemas import TOOLS
from zmqengine.errors import BadRequest
from zmqengine_http.call_grammars.schema_keywords import unenforced_keywords

SUITE = os.environ.get("ZMQENGINE_TEST_SCHEMA_SUITE")
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
PASSED: dict[str, Any] = {
    "enum": {"properties": {"a": {"enum": ["x", [2**53 + 1]]}}},
    "const": {"const": 1234567890123456789},
    "multipleOf": {"type": "integer", "multipleOf": 2**60 + 1},
    "not": {"not": TEXT},
    "uniqueItems": {"type": "array", "items": {"type": "array", "uniqueItems": True}},
    "contains": {"type": "array", "contains": INTEGER},
    "if": {"properties": {"a": {"if": TEXT, "then": {"minLength": 2}}}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "format: phone": {"$defs": {"x": {"type": "string", "format": "phone"}}, "$ref": "#/$defs/x"},
    "minProperties": {"type": "object", "minProperties": 3},
    "maxProperties": {"type": "object", "properties": {"a": {}}, "maxProperties": 3},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
}
ENFORCED: list[Any] = [
    {"oneOf": [INTEGER, TEXT]},
    {"type": "object", "required": ["a"], "minProperties": 2},
    {"type": "string", "format": "uuid"},
    {"properties": {"not": INTEGER, "uniqueItems": TEXT}},
    {"const": {"not": 1}},
    {"enum": [2**53, -(2**60)]},
    {"type": "integer", "maximum": 2**63 - 1},
    *TOOLS.values(),
]


@pytest.fixture(scope="module")
def walker() -> GrammarWalker:
    return GrammarWalker.of_pico()


@pytest.mark.parametrize("keyword", PASSED)
def test_what_is_passed_over_is_named(walker: GrammarWalker, keyword: str) -> None:
    """Wherever it stands; the worker refuses the same schema where it is insisted on."""
    schema = PASSED[keyword]
    assert keyword in unenforced_keywords(schema)
    with pytest.raises(BadRequest):
        walker.compile(schema)
    walker.compile({**schema, "x-guidance": {"lenient": True}})


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:30])
def test_what_is_enforced_is_not_named(walker: GrammarWalker, schema: Any) -> None:
    """A name of a member is no keyword, nor is what stands in a value."""
    assert unenforced_keywords(schema) == frozenset()
    walker.compile(schema)


@pytest.mark.slow
@pytest.mark.skipif(SUITE is None, reason="ZMQENGINE_TEST_SCHEMA_SUITE names no JSON Schema Test Suite")
def test_nothing_of_the_test_suite_is_passed_over_in_silence(walker: GrammarWalker) -> None:
    """What llguidance says that it leaves out is named."""
    silent = []
    for draft in ("draft7", "draft2020-12"):
        for file in sorted((Path(str(SUITE)) / "tests" / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                schema = case["schema"]
                if not isinstance(schema, dict):
                    continue
                named = " ".join(unenforced_keywords(schema))
                silent += [
                    (file.name, schema, keyword)
                    for keyword in walker.left_out({**schema, "x-guidance": {"lenient": True}})
                    if keyword not in named and "$ref" not in named
                ]
    assert silent == []
