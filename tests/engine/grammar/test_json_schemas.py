"""JSON schemas against what others say of them: whatever a grammar lets through is valid."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.grammar_walker import GrammarWalker
from tests.support.tool_schemas import TOOLS
from zmqengine.errors import BadRequest

SUITE = os.environ.get("ZMQENGINE_TEST_SCHEMA_SUITE")
"""The directory `json` of an unpacked source distribution of `jsonschema`."""
SEEDS = 20
EXAMPLES = int(os.environ.get("ZMQENGINE_TEST_SCHEMAS", "800"))
DRAFTS = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}
# Python's expressions have other classes of characters than ECMAScript's, which the suite and llguidance follow.
UNCHECKED = "ecmascript-regex.json"


@pytest.fixture(scope="module")
def walker() -> GrammarWalker:
    return GrammarWalker.of_pico()


def check(schema: Any, outputs: Sequence[bytes], validator: Any = jsonschema.Draft202012Validator) -> None:
    checker = validator(schema, format_checker=validator.FORMAT_CHECKER)
    for output in outputs:
        assert [error.message for error in checker.iter_errors(json.loads(output))] == [], (schema, output)


@pytest.mark.parametrize("name", TOOLS)
def test_calls_of_tools_are_valid(walker: GrammarWalker, name: str) -> None:
    """Shapes that agents send are taken, and what ends by itself is right."""
    outputs = walker.walk(walker.compile(TOOLS[name]), range(SEEDS))
    assert outputs
    check(TOOLS[name], outputs)


NAMED = {"properties": {"a": {"type": "integer"}, "ab": {"type": "null"}, "é": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (NAMED, ['{"a": 1}', '{"b": "x"}', '{"abc": "x"}', '{"": "x"}'],
         ['{"\\u0061": "x"}', '{"\\u00e9": "x"}', '{"a": "x"}']),
        ({"format": "date"}, ['"2024-02-29"', '"2000-02-29"', "3"],
         ['"2021-02-29"', '"1900-02-29"', '"0000-01-01"', '"2021-04-31"']),
        ({"format": "time"}, ['"22:59:59Z"', '"01:02:03.5+01:00"'], ['"22:59:60Z"', '"24:00:00Z"', '"01:02:03"']),
        ({"format": "date-time"}, ['"2024-02-29T01:02:03Z"'], ['"2023-02-29T01:02:03Z"', '"1998-12-31T23:58:60Z"']),
        ({"format": "date", "pattern": "^2"}, ['"2024-01-01"'], ['"1999-01-01"']),
        ({"pattern": "^\\S$"}, ['"x"', '"é"'], ['"\ufeff"', '" "']),
        ({"pattern": "^[^\\s,]$"}, ['"x"'], ['"\ufeff"', '","']),
        ({"pattern": "^[^,\\s]$"}, ['"x"', '"]"'], ['"\ufeff"', '","', '" "']),
        ({"pattern": "^([^\\S,]|x)$"}, ['"x"', '" "'], ['"\ufeff"', '","', '"y"']),
        ({"minProperties": 1}, ['{"a": 1}'], ["{}"]),
        ({"enum": [{"properties": {"a": 1}}]}, ['{"properties": {"a": 1}}'], ["{}"]),
        ({"enum": [2**53, -(2**60)]}, [str(2**53), str(-(2**60))], [str(2**53 + 1)]),
        ({"type": "integer", "maximum": 2**53 + 3}, ["7", str(2**53 + 2)], [str(2**53 + 4)]),
        ({"type": "integer", "minimum": -(2**53) - 3}, ["7", str(-(2**53) - 2)], [str(-(2**53) - 4)]),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": -5}, ["-7", str(-(2**62))], ["7", "-4"]),
        ({"type": "integer", "minimum": -1e300, "exclusiveMaximum": -5.0}, ["-7"], ["7", "-5"]),
        ({"type": "number", "minimum": -(2**70), "maximum": -5}, ["-7.5"], ["7"]),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_is_easily_let_through_is_not(
    walker: GrammarWalker, schema: Any, allowed: Sequence[str], forbidden: Sequence[str]
) -> None:
    """Names and dates that look right, and what must still be sayable."""
    grammar = walker.compile(schema)
    assert [text for text in allowed if not walker.allows(grammar, text)] == []
    assert [text for text in forbidden if walker.allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"contentEncoding": "base64"}, "contentEncoding"),
        ({"items": {"contentMediaType": "application/json"}}, "contentMediaType"),
        ({"minProperties": 2}, "minProperties"),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "allOf"),
        ({"patternProperties": {"^a": {}}}, "patternProperties"),
        ({"properties": {'a"b': {}}}, "quotes"),
        ({"$ref": "#/$defs/x", "$id": "y", "$defs": {"x": {}}}, "beside"),
        ({"const": 2**53 + 1}, "9007199254740993"),
        ({"items": {"anyOf": [{"enum": ["a", {"id": 1234567890123456789}]}]}}, "1234567890123456789"),
        ({"properties": {"const": {"multipleOf": 2**60 + 1}}, "additionalProperties": False}, "multipleOf"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_would_not_be_enforced_is_refused(walker: GrammarWalker, schema: Any, named: str) -> None:
    """By its keyword; a caller who does not insist is served."""
    with pytest.raises(BadRequest, match=named):
        walker.compile(schema)
    walker.compile({**schema, "x-guidance": {"lenient": True}})


@pytest.mark.parametrize(
    ("least", "most"), [(-(2**63), -(2**63) + 1), (-1e300, -1e299), (-(2**70), -(2**63))]
)
def test_bounds_below_64_bits_leave_the_worker_alive(
    walker: GrammarWalker, least: float, most: float
) -> None:
    """llguidance overflowed its stack, which ended the worker, and the next one by the same request."""
    with pytest.raises(BadRequest, match="nsatisfiable"):
        walker.compile({"type": "integer", "minimum": least, "maximum": most})


def test_schemas_within_a_grammar_are_taken_to_the_letter_too(walker: GrammarWalker) -> None:
    """Those of tool calls, and none that only looks like one: in a text, an expression or a comment."""
    grammar = walker.compile_text("lark", f'start: "f(" %json {json.dumps(NAMED)} ")"\n')
    assert walker.allows(grammar, 'f({"a": 1, "b": "x"})')
    assert not walker.allows(grammar, 'f({"\\u0061": "x"})')
    with pytest.raises(BadRequest, match="contentEncoding"):
        walker.compile_text("lark", 'start: "x" %json {"contentEncoding": "base64"}')
    quoted = walker.compile_text(
        "lark", 'start: "%json {\\"contentEncoding\\": 1}" /%json [{]/ // %json {"not": {}}\n'
    )
    assert walker.allows(quoted, '%json {"contentEncoding": 1}%json {')


def suite() -> Iterator[tuple[Any, dict[str, Any], bool]]:
    """Validator, case, and whether Python can check it, of every case of the two drafts."""
    for draft, validator in DRAFTS.items():
        for file in sorted((Path(str(SUITE)) / "tests" / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                yield validator, case, file.name != UNCHECKED


@pytest.mark.slow
@pytest.mark.skipif(SUITE is None, reason="ZMQENGINE_TEST_SCHEMA_SUITE names no JSON Schema Test Suite")
def test_the_test_suite_finds_nothing_that_is_let_through(walker: GrammarWalker) -> None:
    """Walks are valid by `jsonschema`, and no text that the suite calls invalid is allowed."""
    accepted = refused = walked = told = 0
    for validator, case, checked in suite():
        try:
            grammar = walker.compile(case["schema"])
        except BadRequest:
            refused += 1
            continue
        accepted += 1
        if checked:
            outputs = walker.walk(grammar, range(SEEDS))
            check(case["schema"], outputs, validator)
            walked += len(outputs)
        for instance in case["tests"]:
            if not instance["valid"]:
                told += 1
                for ascii_only in (True, False):
                    text = json.dumps(instance["data"], ensure_ascii=ascii_only)
                    assert not walker.allows(grammar, text), (case, text)
    print(
        f"{accepted} schemas accepted, {refused} refused, {walked} outputs valid, {told} invalid texts kept out"
    )
    assert accepted > 300
    assert walked > 10 * accepted


def schemas_of(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas so deep, of the keywords that a grammar can have, in any mixture."""
    small = st.integers(0, 4)
    members: dict[str, st.SearchStrategy[Any]] = {
        "required": st.lists(st.sampled_from(["a", "b", "ab"]), unique=True),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}, {"type": "string"}]),
        "minimum": st.integers(-99, 99),
        "exclusiveMaximum": st.integers(-99, 999),
        "multipleOf": st.sampled_from([1, 2, 5, 0.5]),
        "pattern": st.sampled_from(["^a", "[0-9]$", "^\\S+$", "b|c"]),
        "format": st.sampled_from(["date", "ipv4", "uuid"]),
        "const": st.sampled_from([0, "a", None, {"a": 1}]),
    }
    members |= {
        f"{bound}{what}": small for bound in ("min", "max") for what in ("Items", "Length", "Properties")
    }
    if depth:
        deeper = schemas_of(depth - 1)
        members |= {
            "properties": st.dictionaries(st.sampled_from(["a", "ab", "é"]), deeper, max_size=3),
            "items": deeper,
            "prefixItems": st.lists(deeper, min_size=1, max_size=2),
            "anyOf": st.lists(deeper, min_size=1, max_size=2),
            "allOf": st.lists(deeper, min_size=1, max_size=2),
        }
    kinds = ["object", "array", "string", "integer", "number", "boolean", "null"]
    return st.builds(
        lambda kind, some, which: {"type": kind, **{name: some[name] for name in which if name in some}},
        st.sampled_from(kinds),
        st.fixed_dictionaries({}, optional=members),
        st.sets(st.sampled_from(sorted(members)), max_size=5),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_made_up_schemas_let_nothing_through(walker: GrammarWalker) -> None:
    """At least 200 that are accepted and whose walks end."""
    counts = {"accepted": 0, "refused": 0, "outputs": 0}

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schemas_of(2))
    def every_walk_is_valid(schema: Any) -> None:
        try:
            grammar = walker.compile(schema)
        except BadRequest:
            counts["refused"] += 1
            return
        outputs = walker.walk(grammar, range(SEEDS))
        counts["accepted"] += bool(outputs)
        counts["outputs"] += len(outputs)
        check(schema, outputs)

    every_walk_is_valid()
    print(counts)
    assert counts["accepted"] >= 200
