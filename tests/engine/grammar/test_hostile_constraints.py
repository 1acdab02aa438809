"""A hostile constraint is refused, or costs each step a bounded time and its own row an honest end."""

from __future__ import annotations

import json
import random
import re
import resource
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.constrained import HOT, Pico
from tests.support.drafts import by_worth
from tests.support.engines import Run, finish, step
from tests.support.hostile_constraints import HOSTILE, LARK
from zmqengine.engine.grammar import grammar as grammars
from zmqengine.engine.grammar import matcher as matchers
from zmqengine.engine.grammar.grammar import Grammar
from zmqengine.engine.grammar.matcher import ConstraintBroken, RowMatcher
from zmqengine.engine.grammar.schema import PATTERNS_MAX
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.errors import BadRequest

STEP_S_MAX = 0.05
"""Processor time of one operation of one row between two steps."""
COMPILE_S_MAX = 2.0
"""Processor time of compiling, on a thread beside the actor."""
LOCKED_S_MAX = 0.15
"""Longest time for which a compilation keeps the interpreter's lock, in processor time."""
TOKENS = 200


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


def compiled(pico: Pico, name: str) -> Grammar | None:
    kind, text, choices = HOSTILE[name]
    try:
        return pico.grammar(kind, text, choices)
    except BadRequest as error:
        refused = str(error)
    assert "<state>" not in refused
    assert len(refused) < 500
    return None


def test_the_corpus_is_large() -> None:
    """Every kind of constraint, and more than a handful of each."""
    assert len(HOSTILE) >= 70


@pytest.mark.parametrize("name", HOSTILE)
def test_no_operation_takes_long(pico: Pico, name: str) -> None:
    """Compiling, masks, forced tokens and following the output, on random walks that prefer to go on."""
    # The walks are deterministic: a slow operation is slow in each run, interference by another process is not.
    assert any(longest_step_s(pico, name) < STEP_S_MAX for _ in range(3))


def longest_step_s(pico: Pico, name: str) -> float:
    """Processor time of the longest operation after compiling, in seconds."""
    begun_s = time.thread_time()
    grammar = compiled(pico, name)
    assert time.thread_time() - begun_s < COMPILE_S_MAX
    chance, worst_s = random.Random(name), 0.0
    if grammar is None:
        return worst_s
    row = grammar.start([])
    for _ in range(TOKENS):
        begun_s = time.thread_time()
        mask = row.parser.compute_bitmask()
        forced = row.forced
        worst_s = max(worst_s, time.thread_time() - begun_s)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = [int(id_) for id_ in np.flatnonzero(bits) if id_ not in pico.eos]
        begun_s = time.thread_time()
        try:
            row.consume(forced[0] if forced else chance.choice(allowed or pico.eos))
        except ConstraintBroken:
            assert "<state>" not in row.error
            break
        worst_s = max(worst_s, time.thread_time() - begun_s)
        if row.is_complete:
            break
    return worst_s


@pytest.mark.parametrize("options", [{}, {"x-guidance": {"lenient": True}}])
def test_patterns_that_take_long_to_compile_in_pairs_are_refused(pico: Pico, options: dict[str, Any]) -> None:
    """llguidance compares each pattern of an object with each other one: 450 take minutes, 128 take 0.1 s."""

    def nested(count: int) -> str:
        patterns = {f"^{n}[a-z]{{1,400}}$": {"type": "integer"} for n in range(count)}
        patterned = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
        return json.dumps({"type": "array", "items": {"anyOf": [patterned]}, **options})

    begun_s = time.thread_time()
    pico.grammar("json_schema", nested(PATTERNS_MAX))
    with pytest.raises(BadRequest, match="450 patternProperties"):
        pico.grammar("json_schema", nested(450))
    assert time.thread_time() - begun_s < COMPILE_S_MAX


def test_the_states_of_a_parser_are_bounded(pico: Pico) -> None:
    """Each takes memory until the request ends: past the bound the row ends with an error that says so."""
    row, chance = pico.grammar("regex", r"(\p{L}{1,40}\s){0,2000}").start([]), random.Random(1)

    def follow() -> None:
        for _ in range(2_000):
            bits = np.unpackbits(np.frombuffer(row.parser.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(id_) for id_ in np.flatnonzero(bits) if id_ not in pico.eos]
            row.consume(chance.choice(allowed or pico.eos))

    with pytest.raises(ConstraintBroken, match="states"):
        follow()


@pytest.mark.parametrize("name", [name for name in HOSTILE if name.startswith(("lark", "deep"))])
def test_compiling_does_not_keep_the_lock(pico: Pico, name: str) -> None:
    """The actor runs in the same process: it waits for whatever holds the interpreter's lock."""
    gaps, done = [0.0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            process_s = time.process_time()
            time.sleep(0.001)
            gaps.append(time.process_time() - process_s)

    ticker = threading.Thread(target=tick)
    ticker.start()
    compiled(pico, name)
    done.set()
    ticker.join()
    assert max(gaps) < LOCKED_S_MAX + 0.1


@pytest.mark.parametrize(
    "drafting", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "drafting"]
)
def test_neighbours_of_hostile_rows_are_as_if_alone(pico: Pico, drafting: bool) -> None:
    """All of the corpus in batches beside a free row; every row ends, and `stop` is said of whole outputs alone."""
    free = finish_one(pico, drafting)
    grammars = [(name, grammar) for name in HOSTILE if (grammar := compiled(pico, name)) is not None]
    assert len(grammars) > 20
    for start in range(0, len(grammars), 20):
        engine = pico.engine(speculator=by_worth(ForcedRuns()) if drafting else None, rows_max=32)
        group = grammars[start : start + 20]
        rows = [
            pico.row(place, grammar, max_tokens=24, sampling=HOT) for place, (_, grammar) in enumerate(group)
        ]
        assert engine.insert([pico.row(99, None, max_tokens=24), *rows]) == []
        run = finish(engine)
        assert run.ids(99) == free
        failed = {failure.row for failure in run.failures}
        for place, (name, grammar) in enumerate(group):
            if place in failed:
                continue
            assert run.finish(place) in ("stop", "length"), name
            if run.finish(place) == "stop":
                # The end token has been followed: an output that says `stop` is accepted from its beginning to there.
                grammar.start(run.ids(place))


def finish_one(pico: Pico, drafting: bool) -> list[int]:
    engine = pico.engine(speculator=by_worth(ForcedRuns()) if drafting else None)
    engine.insert([pico.row(99, None, max_tokens=24)])
    return finish(engine).ids(99)


@pytest.mark.parametrize(
    ("schema", "runs"),
    [
        ({"type": "string", "pattern": "(dog|cat|boy|girl) .{0,60}(home|happy)", "maxLength": 2000}, 4),
        ({"type": "string", "pattern": "(the|fox).{10,40}(dog|home)"}, 40),
    ],
)
def test_a_constraint_that_is_used_often_does_not_wear_out(pico: Pico, schema: object, runs: int) -> None:
    """Every request starts with a fresh lexer; none ends early because of those before it."""
    text = json.dumps(schema)
    chance = random.Random(1)
    for _ in range(runs):
        row = pico.grammar("json_schema", text).start([])
        made: list[int] = []
        while not row.is_complete and len(made) < 400:
            bits = np.unpackbits(np.frombuffer(row.parser.compute_bitmask(), np.uint8), bitorder="little")
            made.append(chance.choice(np.flatnonzero(bits).tolist()))
            row.consume(made[-1])
        assert made
        if row.is_complete:
            assert re.search(str(schema["pattern"]), json.loads(pico.text.decode(made)))  # type: ignore[index]


def test_a_row_whose_parser_meets_a_limit_ends_with_an_error(pico: Pico) -> None:
    """And not with `stop`, though a parser in error allows an end token and takes it."""
    grammar = pico.grammar("lark", LARK[0])
    a, *_ = pico.text.encode("a").ids
    with pytest.raises(ConstraintBroken, match="items"):
        grammar.start([a] * 2000)
    row = grammar.start([a] * 10)
    while not row.parser.is_error():
        row.parser.compute_bitmask()
        row.parser.consume_token(a)
    assert not row.is_complete
    with pytest.raises(ConstraintBroken):
        row.consume(pico.eos[0])


@pytest.mark.parametrize(
    "name", ["schema many patterns", pytest.param("schema long pattern", marks=pytest.mark.slow)]
)
def test_an_output_near_the_limits_can_be_followed_again(pico: Pico, name: str) -> None:
    """A stream that the next worker resumes, or a resumed row, meets no limit that it did not meet before."""
    followed = 0
    for seed in range(4):
        engine = pico.engine()
        engine.insert([pico.row(seed, compiled(pico, name), max_tokens=200, sampling=HOT)])
        run = finish(engine)
        if run.failures:
            continue
        grammar = compiled(pico, name)
        assert grammar is not None
        matcher = grammar.start(run.ids(seed))
        assert matcher.is_complete == (run.finish(seed) == "stop")
        followed += 1
    assert followed > 2


@pytest.mark.parametrize(("leaves", "may_keep"), [("parked", True), ("parked", False), ("reset", True)])
def test_a_resumed_row_takes_the_matcher_that_was_kept(
    pico: Pico, leaves: str, may_keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To follow a long output again would hold up all streams; another output is followed from its beginning."""
    grammar = compiled(pico, "schema long text")
    assert grammar is not None
    row = pico.row(0, grammar, max_tokens=40, sampling=HOT)
    alone, engine, run = pico.engine(), pico.engine(), Run()
    alone.insert([pico.row(0, compiled(pico, "schema long text"), max_tokens=40, sampling=HOT)])
    wanted = finish(alone).ids(0)
    engine.insert([row])
    while len(run.ids(0)) < 20:
        step(engine, run)
    if leaves == "parked":
        engine.park(0)
    else:
        engine.reset()
    if not may_keep:
        grammar.keep(grammar.start([]))
    starts: list[int] = []
    follow = RowMatcher.consume
    monkeypatch.setattr(
        RowMatcher, "consume", lambda self, token: (starts.append(token), follow(self, token))[1]
    )
    engine.insert([replace(row, row=1, emitted=run.ids(0))])
    assert len(starts) == (0 if may_keep else 20)
    finish(engine, run)
    assert run.ids(0) + run.ids(1) == wanted


def test_an_output_that_takes_too_long_to_follow_again_is_refused(
    pico: Pico, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `emitted` of the whole context under an ambiguous grammar would take a thread of the compiler for minutes."""
    grammar = pico.grammar("lark", 'start: s\ns: s s s | s s | "a" | "b" | "ab"')
    emitted = pico.text.encode("ab" * 6, add_special_tokens=False).ids
    assert grammar.start(emitted).followed == emitted
    monkeypatch.setattr(matchers, "FOLLOW_S_MAX", 0.0)
    with pytest.raises(ConstraintBroken, match="follow the output again takes more than"):
        grammar.start(emitted)


@pytest.mark.parametrize(
    "name",
    [
        "regex [^\\s\\S]",
        "regex a[^\\s\\S]",
        "lark start: start start | start",
        "schema root in a circle",
        "schema circle",
        "schema circle of alternatives",
        "schema endless list",
        "schema impossible member",
    ],
)
def test_a_constraint_that_nothing_satisfies_is_refused(pico: Pico, name: str) -> None:
    """References in a circle, and classes without a character: at once, and again when it is asked again."""
    for _ in range(2):
        assert compiled(pico, name) is None


ROOT = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"], "additionalProperties": ROOT},
        {
            "type": "object", "patternProperties": {"^a$": ROOT}, "required": ["a"], "additionalProperties": False,
        },
        {"type": "object", "minProperties": 1, "additionalProperties": ROOT},
        {"type": "object", "properties": {"a": ROOT}, "minProperties": 1, "additionalProperties": False},
        {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
        {"type": ["array"], "items": ROOT, "minItems": 1.0},
        {"type": "array", "prefixItems": [{"type": "null"}, False], "minItems": 2},
    ],
)  # fmt: skip
def test_a_schema_that_no_finite_value_satisfies_is_refused(pico: Pico, schema: dict[str, Any]) -> None:
    """By whatever keyword a value has to hold itself."""
    with pytest.raises(BadRequest, match="matches nothing"):
        pico.grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"], "additionalProperties": {"anyOf": [ROOT, {"type": "null"}]}},
        {"type": "object", "additionalProperties": ROOT, "minProperties": 0},
        {"type": ["object", "null"], "properties": {"a": ROOT}, "required": ["a"], "additionalProperties": False},
        {
            "type": "object", "patternProperties": {"^a$": ROOT, "^b$": {"type": "null"}}, "required": ["b"],
            "additionalProperties": False,
        },
    ],
)  # fmt: skip
def test_a_recursive_schema_with_a_finite_value_is_taken(pico: Pico, schema: dict[str, Any]) -> None:
    """Null, or no further member, ends it."""
    pico.grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start',
        'start: "a" b\nb: b "c"',
        'start: "a" | b\nb: c+\nc: ("x" b | b "y")',
        'start: "a" b\nb: "x" b~2 b',
        'start: a\na: "x" b // a comment: with a colon\nb[lazy]: (a "|")\n',
        "start: x\nx.1: y\n  | x x\ny: /:/ x",
        'start: "x" /[^\\s\\S]/',
        'start: "x" A | "y"\nA: /[a-z&&0-9]/',
        'start: %json {"x": "|"} rest\nrest: "," rest',
        'start: "x" A\nA: /a/ & /b/',
        'start: "x" | b\nb: _A "y"\n_A: B & /(?s:.*)b/ & C // of 3\nB: /[ab]{2}/\nC: ~/b|ab|bb/',
        'start: "x" | A\nA: ("c" & "d") "e"\n%ignore / /',
        'start: A\nA: %regex {"substring_chars": "abc"}\nB: A & /x/',
    ],
)
def test_a_lark_rule_that_no_text_satisfies_is_refused(pico: Pico, text: str) -> None:
    """It requires itself in each alternative, an empty class of characters, or terminals that exclude each other."""
    with pytest.raises(BadRequest, match="matches nothing"):
        pico.grammar("lark", text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: b*\nb: "x" | b b',
        'start: "a" (start | "b")',
        'start: [start] "a"',
        'start: "b: start" /start: b/ // start\n',
        'start: NUMBER "," start | NUMBER\nNUMBER: /[0-9]+/',
        'start: %json {"anyOf": [{"type": "null"}, {"enum": ["start | "]}]} tail?\ntail: "," start',
        'start: a{0,3}\na: "x" a? \n',
        "start: A\nA: ~/(?s:.*)a.{4}/ & /[^a]*/",
        'start: "x" A\nA: "c" | (/a/ & /b/)',
        'start: "if" A B\nA: /[a-z]+/ & ~/if|else/\nB: "&" /[&~]/',
        "start: /[^a]/ \n | /[^\\s]/",
        'start: p::0x0\np::_: "a" p::incr([0:3]) %if lt([0:3],4)\n | ""',
    ],
)
def test_a_recursive_lark_rule_that_ends_is_taken(pico: Pico, text: str) -> None:
    """Texts, comments, schemas and optional parts make no rule impossible."""
    pico.grammar("lark", text)


def test_where_a_grammar_leads_to_nothing_the_row_fails(pico: Pico, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not refused: it says `stop` of no output, though the parser takes an end token there."""
    monkeypatch.setattr(grammars, "check_rules", lambda *_: None)
    row = pico.grammar("lark", 'start: "x" A\nA: /a/ & /b/').start(pico.text.encode("x").ids)
    row.parser.compute_bitmask()
    assert not row.is_complete
    with pytest.raises(ConstraintBroken):
        row.consume(pico.eos[0])


def test_memory_does_not_grow_with_the_constraints_that_were_used(pico: Pico) -> None:
    """Of a request that has ended nothing is kept."""

    def once() -> int:
        for name in (
            "schema long pattern",
            "regex (dog|cat).{10,400}(home|happy)",
            "regex ((ab){300}c{300}){300}",
        ):
            grammar = compiled(pico, name)
            assert grammar is not None
            row = grammar.start([])
            for _ in range(60):
                bits = np.unpackbits(np.frombuffer(row.parser.compute_bitmask(), np.uint8), bitorder="little")
                row.consume(int(np.flatnonzero(bits)[0]))
                if row.is_complete:
                    break
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    first = [once() for _ in range(5)][-1]
    assert [once() for _ in range(20)][-1] - first < 64 << 10
