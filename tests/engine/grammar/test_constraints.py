"""Output held to a grammar, on the bundled model: always right, and nobody else notices."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.constrained import HOT, PERSON, Pico, run_all
from tests.support.drafts import by_worth, speculator
from tests.support.engines import Run, finish, step
from zmqengine.engine.grammar.grammar import Kind, compile_grammar, vocabulary
from zmqengine.engine.grammar.mask import MaskFiller
from zmqengine.engine.grammar.matcher import ConstraintBroken, RowMatcher
from zmqengine.engine.interface import Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.errors import BadRequest

SAMPLINGS = [
    pytest.param(Sampling(), marks=pytest.mark.slow, id="greedy"),
    pytest.param(HOT, id="sampled"),
]


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 120
    assert set(person["tags"]) <= {"kind", "brave"}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_ends_by_itself_satisfies_its_constraint(pico: Pico, sampling: Sampling) -> None:
    """Each kind, several rows of each in one batch; what is cut says `length`."""
    schema = pico.grammar("json_schema", json.dumps(PERSON))
    regex = pico.grammar("regex", r"[0-9]{3}-[a-z]{4}")
    choice = pico.grammar("choice", choices=["yes", "no", 'per"haps\n'])
    lark = pico.grammar("lark", 'start: "x" ("y")* "z"')
    any_json = pico.grammar("json")
    kinds = [schema, regex, choice, lark, any_json]
    rows = [pico.row(place, kinds[place % 5], sampling=sampling) for place in range(20)]
    run = run_all(pico.engine(), rows)
    checked = 0
    for place in range(20):
        text = pico.said(run, place)
        if run.finish(place) == "length":
            assert len(run.ids(place)) == 200
            continue
        checked += 1
        if place % 5 == 0:
            check_person(text)
        elif place % 5 == 1:
            assert re.fullmatch(r"[0-9]{3}-[a-z]{4}", text)
        elif place % 5 == 2:
            assert text in ("yes", "no", 'per"haps\n')
        elif place % 5 == 3:
            assert re.fullmatch("xy*z", text)
        else:
            assert isinstance(json.loads(text), dict)
    assert checked >= 12


def test_a_row_is_the_same_alone_in_a_batch_parked_and_resumed(pico: Pico) -> None:
    """Its neighbours, with grammars or without, change nothing; nor does a pause, nor another life of the worker."""
    grammar = pico.grammar("json_schema", json.dumps(PERSON))
    for sampling in (Sampling(), HOT):
        wanted = run_all(pico.engine(), [pico.row(7, grammar, sampling=sampling)]).ids(7)
        free = run_all(pico.engine(), [pico.row(9, None, sampling=sampling, max_tokens=60)]).ids(9)
        crowd = [
            pico.row(place, grammar, "Once upon a time", sampling=HOT, max_tokens=40)
            for place in range(20, 24)
        ]
        together = run_all(
            pico.engine(),
            [
                pico.row(9, None, sampling=sampling, max_tokens=60),
                *crowd,
                pico.row(7, grammar, sampling=sampling),
            ],
        )
        assert together.ids(7) == wanted
        assert together.ids(9) == free
        for cut in (5, len(wanted) - 1):
            resumed = pico.row(7, grammar, sampling=sampling, emitted=wanted[:cut])
            assert run_all(pico.engine(), [resumed]).ids(7) == wanted[cut:]
        engine, run = pico.engine(), Run()
        engine.insert([pico.row(7, grammar, sampling=sampling)])
        while len(run.ids(7)) < 6:
            step(engine, run)
        engine.park(7)
        engine.insert([pico.row(8, grammar, sampling=sampling, emitted=run.ids(7), seed=7)])
        finish(engine, run)
        assert run.ids(7) + run.ids(8) == wanted


@pytest.mark.parametrize("removed", [True, False])
def test_the_constraint_of_the_last_row_is_freed_without_another_step(pico: Pico, removed: bool) -> None:
    """Its memory ends with the row, though the row's step in flight lands with the next request only."""
    engine, run = pico.engine(), Run()
    gc.collect()
    before = len(matchers())
    engine.insert([pico.row(1, pico.grammar("regex", "[a-z]{60}"), sampling=HOT, max_tokens=10)])
    while len(run.ids(1)) < 3:
        step(engine, run)
    assert len(matchers()) > before
    if removed:
        engine.remove([1])
    else:
        finish(engine, run)
    gc.collect()
    assert len(matchers()) == before


def matchers() -> list[RowMatcher]:
    return [each for each in gc.get_objects() if isinstance(each, RowMatcher)]


def test_parked_rows_that_differ_in_their_grammar_alone_are_not_mixed_up(pico: Pico) -> None:
    """The token on its way when a row was parked is that of its own grammar."""
    digits, letters = pico.grammar("regex", "(7|[0-9]{9})"), pico.grammar("regex", "(7|[a-z]{9})")
    engine, run = pico.engine(), Run()
    rows = [
        pico.row(0, digits, seed=1),
        pico.row(1, letters, seed=1),
        pico.row(2, None, seed=1, max_tokens=9),
    ]
    wanted = [run_all(pico.engine(), [row]).ids(row.row) for row in rows]
    engine.insert(rows)
    step(engine, run)
    step(engine, run)
    for row in rows:
        engine.park(row.row)
    assert engine.memory().parked > 0
    engine.insert([replace(row, row=10 + row.row, emitted=run.ids(row.row)) for row in reversed(rows)])
    finish(engine, run)
    assert [run.ids(row) + run.ids(10 + row) for row in range(3)] == wanted


def test_no_mask_is_filled_for_a_row_that_has_ended(pico: Pico, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step may be on its way, and nobody takes what is chosen in it; the other row goes on."""
    filled: list[bool] = []
    fill = MaskFiller.fill_windows

    def watched(self: MaskFiller, matchers: Sequence[RowMatcher | None], *args: Any) -> np.ndarray:
        filled.extend(matcher.is_complete for matcher in matchers if matcher is not None)
        return fill(self, matchers, *args)

    monkeypatch.setattr(MaskFiller, "fill_windows", watched)
    rows = [pico.row(0, pico.grammar("regex", "[0-9]{2}")), pico.row(1, pico.grammar("regex", "[0-9]{9}"))]
    run_all(pico.engine(), rows)
    assert filled
    assert not any(filled)


def test_a_constraint_may_begin_after_a_marker(pico: Pico) -> None:
    """Free until then, and without an end; from the marker on it holds, whatever tokens the marker came in."""
    free = run_all(pico.engine(), [pico.row(0, None, max_tokens=30, stop_token_ids=frozenset())]).ids(0)
    marker = str(pico.text.decode(free[4:6]))
    spelled = [id_ for character in marker for id_ in pico.text.encode(character).ids]
    assert len(spelled) > 2
    for after in (free[4:6], spelled):
        grammars = [
            pico.grammar("regex", "[0-9]{5}", after=after),
            pico.grammar("lark", 'start: "1" /[0-9]{4}/', after=after),
            pico.grammar("choice", choices=["99999", "12345"], after=after),
            pico.grammar(
                "json_schema", '{"type": "integer", "minimum": 10000, "maximum": 99999}', after=after
            ),
        ]
        run = run_all(pico.engine(), [pico.row(place, each, seed=0) for place, each in enumerate(grammars)])
        for place in range(len(grammars)):
            assert run.ids(place)[:6] == free[:6]
            assert re.fullmatch("[0-9]{5}", pico.text.decode(run.ids(place)[6:]))
            assert run.finish(place) == "stop"


def test_a_token_may_not_reach_over_a_marker_into_what_is_forbidden(pico: Pico) -> None:
    """Where a token has the end of the marker and more, that must be the beginning of what is to come."""
    luck, lucky = (pico.tokens.tokenize_str(text) for text in (" luck", " lucky"))
    assert len(luck) == len(lucky) == 1
    filler = MaskFiller(pico.loaded.info.vocab_size, pico.eos)
    for answer, may in (("[0-9]+", False), ("y?[0-9]", True)):
        row = pico.grammar("regex", answer, after=luck).start([])
        allowed = np.unpackbits(filler.fill_windows([row], [()], 1).view(np.uint8), bitorder="little")
        assert allowed[luck[0]]
        assert bool(allowed[lucky[0]]) == may
        assert not allowed[pico.eos].any()


def test_special_tokens_as_a_marker_must_come_as_themselves(pico: Pico) -> None:
    """Their name, spelled in other tokens, is a text like any other."""
    (user,) = pico.text.encode("<|user|>").ids
    spelled = [id_ for character in "<|user|>" for id_ in pico.text.encode(character).ids]
    matcher = pico.grammar("regex", "[0-9]", after=[user]).start(spelled)
    assert not matcher.begun
    matcher.consume(user)
    assert matcher.begun
    with pytest.raises(ConstraintBroken):
        matcher.consume(user)


def test_penalties_bias_and_logprobs_go_with_a_constraint(pico: Pico) -> None:
    """They change which of the allowed tokens comes; log-probabilities are finite, forbidden alternatives included."""
    (nine,) = pico.text.encode("9").ids
    grammar = pico.grammar("regex", "[0-9]{6}")
    biased = pico.row(0, grammar, sampling=Sampling(logit_bias={nine: 50.0}), logprobs=5)
    tired = pico.row(
        1, grammar, sampling=Sampling(logit_bias={nine: 5.0}, presence_penalty=2.0, frequency_penalty=2.0)
    )
    run = run_all(pico.engine(), [biased, tired])
    assert pico.said(run, 0) == "999999"
    assert len(set(pico.said(run, 1))) > 1
    for token in run.tokens[0]:
        assert token.logprobs is not None
        assert all(np.isfinite([token.logprobs.logprob, *(logprob for _, logprob in token.logprobs.top)]))


def test_a_constraint_that_can_only_end_wins_over_min_tokens(pico: Pico) -> None:
    """While it can go on it does; a mask is never empty, whether an end token or a stop token is all that is left."""
    (nine,) = pico.text.encode("9").ids
    late = Sampling(min_tokens=8)
    longer = pico.row(0, pico.grammar("regex", "9{2,20}"), sampling=late)
    short = pico.row(1, pico.grammar("choice", choices=["yes"]), sampling=late)
    stops = frozenset({*pico.eos, nine})
    only = pico.row(2, pico.grammar("regex", "a9{3}"), sampling=late, stop_token_ids=stops)
    run = run_all(pico.engine(), [longer, short, only])
    assert len(run.ids(0)) >= 8
    assert pico.said(run, 1) == "yes"
    assert pico.said(run, 2) == "a9"
    assert [run.finish(row) for row in (1, 2)] == ["stop", "stop"]


def test_ids_that_the_tokenizer_does_not_have_never_come(pico: Pico) -> None:
    """A model may have more logits than its tokenizer has tokens."""
    size = pico.loaded.info.vocab_size
    wide = vocabulary(pico.loaded.tokenizer.tokenizer_json, vocab_size=size + 100, eos_token_ids=pico.eos)
    filler = MaskFiller(size + 100, pico.eos)
    free = compile_grammar(wide, "regex", "(.|\n)*")
    later = compile_grammar(wide, "regex", "(.|\n)*", after=[3])
    bits = filler.fill_windows([free.start([]), later.start([]), None], [()] * 3, 1)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=size + 100, bitorder="little")
    assert not allowed[0, size:].any()
    assert allowed[0, :size].sum() > size // 2
    assert not allowed[1, pico.eos].any()
    assert allowed[2].all()


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json_schema", '{"not": {"type": "string"}}', '"not"'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://example.org/x"}', "example.org"),
        ("json_schema", '{"a', "valid JSON"),
        ("json_schema", "[1]", "an object"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested too deep"),
        ("json_schema", '{"items":' * 400 + "{}" + "}" * 400, "nested too deep"),
        ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000, "nested too deep"),
        ("lark", "start: %json " + '{"items":' * 400 + "{}" + "}" * 400, "nested too deep"),
        ("regex", "(a+", "unclosed"),
        ("lark", "start: nobody", "nobody"),
        ("choice", "", "choices"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(pico: Pico, kind: Kind, text: str, named: str) -> None:
    """The message names the keyword or the place."""
    with pytest.raises(BadRequest, match=re.escape(named)):
        pico.grammar(kind, text)


def test_tokens_that_break_the_constraint_are_told(pico: Pico) -> None:
    """Output of another constraint cannot be continued under this one. The error, which a log may have, quotes
    neither."""
    grammar = pico.grammar("regex", "dogs? [0-9]+")
    for output in ("cat", "dogs are", "do cat"):
        with pytest.raises(ConstraintBroken, match=r"^the output does not follow it$"):
            grammar.start(pico.text.encode(output).ids)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_of_constrained_rows_change_nothing(pico: Pico, sampling: Sampling) -> None:
    """What the grammar forces and what was said before, beside rows that are free; each place has its own mask."""
    schema = pico.grammar("json_schema", json.dumps(PERSON))
    late = pico.grammar("choice", choices=["yes", "no"], after=pico.text.encode(" was").ids)
    rows = [
        pico.row(place, (schema, late, None)[place % 3], sampling=sampling, logprobs=1) for place in range(9)
    ]
    wanted = run_all(pico.engine(), rows)
    drafting = by_worth(ForcedRuns(), Ngrams(pico.loaded.info.vocab_size))
    run = run_all(pico.engine(speculator=drafting), rows)
    for row in rows:
        assert run.ids(row.row) == wanted.ids(row.row)
        assert run.finish(row.row) == wanted.finish(row.row)
    forced = [draft for draft in run.drafts if draft.source == "grammar"]
    assert sum(draft.accepted for draft in forced) > 10
    assert {draft.row for draft in forced} <= {0, 3, 6, 1, 4, 7}


def test_a_grammar_that_cannot_roll_back_has_no_drafts(pico: Pico) -> None:
    """llguidance takes back no token of a lexeme with `stop` or `max_tokens`: a draft would break the constraint."""
    for attributes in ('stop="zq"', "max_tokens=90"):
        row = pico.row(0, pico.grammar("lark", f"start: told\ntold[{attributes}]: /(ab){{30}}/"))
        wanted = run_all(pico.engine(), [row])
        run = run_all(
            pico.engine(speculator=by_worth(ForcedRuns(), Ngrams(pico.loaded.info.vocab_size))), [row]
        )
        assert (run.ids(0), run.finish(0), run.drafts) == (wanted.ids(0), wanted.finish(0), [])


def test_what_a_grammar_forces_saves_steps(pico: Pico) -> None:
    """Also where a run of forced tokens begins with a token that is on its way: the source knows how often they do."""
    rows = [
        pico.row(place, pico.grammar("json_schema", json.dumps(PERSON)), sampling=HOT) for place in range(4)
    ]
    plain, drafting = pico.engine(), pico.engine(speculator=by_worth(ForcedRuns()))
    wanted, run = run_all(plain, rows), run_all(drafting, rows)
    assert [run.ids(row.row) for row in rows] == [wanted.ids(row.row) for row in rows]
    assert drafting.stats().steps < 0.7 * plain.stats().steps


class Partly:
    """Knows the next token of an output, and goes on with tokens that no grammar here allows."""

    name = "partly"
    prior = 0.9

    def __init__(self, output: Sequence[int], wrong: int) -> None:
        self._output = output
        self._wrong = wrong

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        made = len(rows[0].tokens) - rows[0].prompt_tokens
        return [[*self._output[made : made + 1], *[self._wrong] * count][:count] for count in counts]

    def release(self) -> None:
        """It keeps nothing of a row."""

    def clear(self) -> None:
        """It keeps nothing of a row."""


def test_draft_tokens_that_the_grammar_forbids_are_not_verified(pico: Pico) -> None:
    """A draft ends before the first of them: masks would stop it all the same, after a block that was for nothing."""
    row = pico.row(0, pico.grammar("regex", "[0-9]{30}"), sampling=HOT)
    wanted = run_all(pico.engine(), [row])
    (wrong,) = pico.text.encode("a").ids
    run = run_all(pico.engine(speculator=speculator(Partly(wanted.ids(0), wrong), widths=(4,))), [row])
    assert run.ids(0) == wanted.ids(0)
    assert len(run.drafts) >= 3
    assert {(draft.proposed, draft.accepted) for draft in run.drafts} == {(1, 1)}
