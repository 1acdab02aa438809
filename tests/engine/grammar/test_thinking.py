"""A bound on reasoning, in the bundled model: exact at the bound, invisible before it, and the same however it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.constrained import HOT, PERSON, Pico, run_all
from tests.support.drafts import speculator
from tests.support.engines import Run, finish, step
from zmqengine.engine.grammar.thinking import ThinkingBound, thinking_bound
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.speculation.forced_runs import ForcedRuns
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.speculation.predictions import Predictions
from zmqengine.protocol.messages import ThinkingMax

CLOSE, OPEN = "</think>", "<think>"


@pytest.fixture(scope="module")
def pico() -> Pico:
    return Pico()


def bound(pico: Pico, tokens: int, closer: str = CLOSE, opener: str = OPEN, **fields: Any) -> ThinkingBound:
    """A bound on reasoning that the prompt has opened."""
    encode = pico.text.encode
    fields = {"opened": True, "then": encode("\n").ids, **fields}
    return thinking_bound(tokens, encode(closer).ids, encode(opener).ids, vocabulary=pico.tokens, **fields)


_engines: list[Any] = []


def free(pico: Pico, row: RowRequest) -> list[int]:
    """The output of a row that is alone."""
    if not _engines:
        _engines.append(pico.engine())
    return run_all(_engines[0], [row]).ids(row.row)


def test_the_closer_comes_at_the_bound(pico: Pico) -> None:
    """Up to the bound the tokens are those without one; then come the closer's and those behind it, and no others."""
    forced = [*pico.text.encode(CLOSE).ids, *pico.text.encode("\n").ids]
    assert len(forced) > 4
    samplings = [Sampling(), HOT, Sampling(temperature=0.7, frequency_penalty=1.0)]
    rows = [
        pico.row(place, None, sampling=samplings[place % 3], max_tokens=60, seed=1) for place in range(18)
    ]
    bounds = [0, 1, 7, 8, 9, 30]
    plain = [free(pico, row) for row in rows[:3]]
    rows = [replace(row, thinking=bound(pico, bounds[row.row // 3])) for row in rows]
    run = run_all(pico.engine(), rows)
    for row in rows:
        output, tokens = run.ids(row.row), bounds[row.row // 3]
        stop = tokens + len(forced)
        assert output[:stop] == plain[row.row % 3][:tokens] + forced
        assert output[stop:] == free(pico, replace(row, thinking=None, emitted=output[:stop]))


def test_a_special_closer_is_one_token(pico: Pico) -> None:
    """It is the special token itself, and its letters do not end the reasoning."""
    (closer,) = pico.text.encode("<|system|>").ids
    plain = free(pico, pico.row(1, None, max_tokens=40))
    given = bound(pico, 20, "<|system|>", then=())
    assert free(pico, pico.row(1, None, max_tokens=40, thinking=given))[:21] == [*plain[:20], closer]
    letters = [pico.text.token_to_id(letter) for letter in "<|system|>"]
    row = pico.row(1, None, max_tokens=40, thinking=given, emitted=letters)
    assert free(pico, row)[20 - len(letters)] == closer


@pytest.mark.parametrize("cut", [0, 1])
def test_a_closer_of_the_model_ends_the_count_in_whatever_tokens(pico: Pico, cut: int) -> None:
    """A closer of several tokens, which the model writes in others: behind it nothing is forced."""
    plain = free(pico, pico.row(1, None, max_tokens=60))
    closer = pico.text.decode(plain[10:13])[: -1 if cut else None]
    assert closer not in pico.text.decode(plain[:12])
    if cut:
        assert pico.text.encode(closer).ids != plain[10:13]
    for tokens in (12 + cut, 14, 20, 59):
        assert free(pico, pico.row(1, None, max_tokens=60, thinking=bound(pico, tokens, closer))) == plain
    early = free(pico, pico.row(1, None, max_tokens=60, thinking=bound(pico, 9, closer)))
    assert early[: 9 + len(pico.text.encode(closer).ids)] == plain[:9] + pico.text.encode(closer).ids


def test_a_closer_that_has_begun_at_the_bound_is_not_cut(pico: Pico) -> None:
    """The rest of its tokens come, not all of them again."""
    closer = pico.text.encode(CLOSE).ids
    row = pico.row(1, None, max_tokens=30, thinking=bound(pico, 6))
    for begun in range(1, len(closer)):
        words = free(pico, pico.row(1, None, max_tokens=30))[: 6 - begun]
        output = free(pico, replace(row, emitted=[*words, *closer[:begun]]))
        assert output[: len(closer) - begun] == closer[begun:]


def test_reasoning_that_the_model_opens_is_counted_from_there(pico: Pico) -> None:
    """Behind white space at most: an opener that comes later is text."""
    plain = free(pico, pico.row(1, None, max_tokens=60))
    text, closer = pico.text.decode(plain[:3]), pico.text.encode(CLOSE).ids
    opener = text.lstrip()
    given = bound(pico, 5, opener=opener, opened=False, then=())
    output = free(pico, pico.row(1, None, max_tokens=60, thinking=given))
    assert output[: 8 + len(closer)] == [*plain[:8], *closer]
    later = bound(pico, 5, opener=pico.text.decode(plain[5:8]), opened=False)
    assert free(pico, pico.row(1, None, max_tokens=60, thinking=later)) == plain
    assert free(pico, pico.row(1, None, max_tokens=60, thinking=replace(later, repeats=True))) != plain


def test_reasoning_that_repeats_has_one_bound_for_all_of_it(pico: Pico) -> None:
    """A special opener anywhere; when the bound is spent it cannot come again, whatever the model would like."""
    opener, closer = (int(pico.text.token_to_id(name) or 0) for name in ("<|user|>", "<|system|>"))
    likes = Sampling(logit_bias={opener: 100.0})
    given = bound(pico, 12, "<|system|>", "<|user|>", opened=False, repeats=True, then=())
    row = pico.row(1, None, max_tokens=50, sampling=likes, thinking=given)
    output = free(pico, row)
    assert output[:14] == [opener] * 13 + [closer]
    assert opener not in output[14:]
    words = free(pico, pico.row(1, None, max_tokens=30))[:8]
    closed = [opener, *words, closer, *words, opener]
    output = free(pico, replace(row, emitted=closed))
    assert output[:5] == [opener] * 4 + [closer]
    assert opener not in output[5:]


@pytest.mark.slow
def test_a_bound_is_the_same_alone_in_a_batch_parked_resumed_and_drafted(pico: Pico) -> None:
    """Neighbours with bounds, with grammars and with neither, in one batch; cut at every token and resumed."""
    schema = pico.grammar("json_schema", json.dumps(PERSON))
    first = pico.row(3, None, "Tell me about Tom. ", sampling=HOT, max_tokens=3)
    opener = pico.text.decode(free(pico, first)).lstrip()
    bounds = [
        bound(pico, 11),
        bound(pico, 4, "<|system|>"),
        None,
        bound(pico, 6, opener=opener, opened=False),
    ]

    def rows(**fields: Any) -> list[RowRequest]:
        return [
            pico.row(
                place,
                schema if place % 5 == 4 else None,
                "Tell me about Tom. " * (1 + place % 3),
                sampling=HOT if place % 2 else Sampling(),
                max_tokens=40,
                thinking=bounds[place % 4],
                **fields,
            )
            for place in range(10)
        ]

    wanted = [free(pico, row) for row in rows()]
    # Of the others, two write no opener and two have a grammar without a place for the closer.
    plain = [free(pico, replace(row, thinking=None)) for row in rows()]
    assert [place for place in range(10) if plain[place] == wanted[place]] == [2, 4, 6, 7, 9]
    together = run_all(pico.engine(), rows())
    assert [together.ids(place) for place in range(10)] == wanted
    words = pico.loaded.info.vocab_size
    for widths in ((4,), (4, 8)):
        drafts = speculator(ForcedRuns(), Predictions(), Ngrams(words), widths=widths)
        drafted = run_all(
            pico.engine(speculator=drafts),
            [replace(row, prediction=wanted[row.row]) for row in rows()],
        )
        assert [drafted.ids(place) for place in range(10)] == wanted
        assert drafted.drafts
    for cut in range(1, 30, 7):
        resumed = [
            replace(row, emitted=wanted[row.row][:cut]) for row in rows() if len(wanted[row.row]) > cut
        ]
        run = run_all(pico.engine(), resumed)
        for row in resumed:
            assert run.ids(row.row) == wanted[row.row][cut:]
    engine, run = pico.engine(), Run()
    engine.insert(rows())
    for life in range(1, 6):
        for _ in range(4):
            step(engine, run)
        for row in rows():
            id_ = row.row + 100 * (life - 1)
            if not run.ended(id_):
                so_far = [token for past in range(life) for token in run.ids(row.row + 100 * past)]
                assert engine.park(id_) or not so_far
                engine.insert([replace(row, row=row.row + 100 * life, emitted=so_far, seed=row.row)])
    finish(engine, run)
    assert run.failures == []
    for place, output in enumerate(wanted):
        assert [token for life in range(6) for token in run.ids(place + 100 * life)] == output


@pytest.mark.parametrize("closer", [CLOSE, "<|system|>"])
@pytest.mark.parametrize("drafting", [False, True])
def test_a_grammar_begins_behind_the_closer(pico: Pico, closer: str, drafting: bool) -> None:
    """One of text and one of a special token; the whole is JSON from there on."""
    after = pico.text.encode(closer).ids
    grammar = pico.grammar("json_schema", json.dumps(PERSON), after=after)
    rows = [
        pico.row(place, grammar, sampling=HOT, thinking=bound(pico, 3 * place, closer, then=()))
        for place in range(4)
    ]
    drafts = speculator(ForcedRuns(), Ngrams(pico.loaded.info.vocab_size)) if drafting else None
    run = run_all(pico.engine(speculator=drafts), rows)
    for place in range(4):
        output = run.ids(place)
        assert output[3 * place : 3 * place + len(after)] == after
        if run.finish(place) == "stop":
            person = json.loads(pico.text.decode(output[3 * place + len(after) :]))
            assert set(person) == {"name", "age", "tags"}
    assert any(run.finish(place) == "stop" for place in range(4))


def test_a_grammar_that_has_no_place_for_the_closer_wins(pico: Pico) -> None:
    """It covers the reasoning: the closer comes where the grammar allows it, and never at all if it does not."""
    never = pico.grammar("regex", "[a-z ]{30,40}")
    wanted = free(pico, pico.row(1, never, sampling=HOT))
    assert free(pico, pico.row(1, never, sampling=HOT, thinking=bound(pico, 5))) == wanted
    late = pico.grammar("regex", "[a-z ]{30}</think>[0-9]{3}")
    output = free(pico, pico.row(1, late, sampling=HOT, thinking=bound(pico, 5, then=())))
    assert free(pico, pico.row(1, late, sampling=HOT)) == output
    free_text = pico.grammar("lark", 'start: before /[0-9]{3}/\nbefore[suffix="</think>"]: /(?s:.*)/')
    output = free(pico, pico.row(1, free_text, sampling=HOT, thinking=bound(pico, 5, then=())))
    closer = pico.text.encode(CLOSE).ids
    assert output[5 : 5 + len(closer)] == closer
    assert pico.text.decode(output[5 + len(closer) :]).isdigit()


def test_a_row_far_from_its_bound_needs_no_mask(pico: Pico) -> None:
    """As fast as one without: only the steps around the bound wait for the host."""
    engine, run = pico.engine(), Run()
    engine.insert([pico.row(1, None, max_tokens=80, thinking=bound(pico, 40))])
    masked = []
    while not run.ended(1):
        step(engine, run)
        row = engine._rows.get(1)
        if row is not None and row.matcher is not None:
            masked.append(len(run.ids(1)))
    assert 30 <= masked[0] <= 34
    assert masked[-1] <= 50


@pytest.mark.parametrize("drafting", [False, True])
def test_channels_of_a_grammar_are_bounded_together(pico: Pico, drafting: bool) -> None:
    """Messages of reasoning and then an answer, by special tokens as in harmony; no further one once all is spent."""
    opener, answer, closer = (
        int(pico.text.token_to_id(f"<|{name}|>") or 0) for name in ("user", "assistant", "system")
    )
    channels = pico.grammar(
        "lark",
        f"start: thought* <[{answer}]> /[0-9]{{3}}/\nthought: <[{opener}]> /[a-zA-Z ,.]*/ <[{closer}]>",
    )
    given = ThinkingMax(10, [closer], [opener], then=[answer], repeats=True)
    # The last one's `then` is what the grammar does not allow.
    bounds = [given, msgspec.structs.replace(given, then=[]), msgspec.structs.replace(given, then=[closer])]
    likes = Sampling(temperature=0.9, logit_bias={opener: 20.0, closer: -2.0})
    rows = [
        pico.row(
            place,
            channels,
            sampling=likes,
            max_tokens=60,
            thinking=thinking_bound(**msgspec.structs.asdict(bounds[place % 3]), vocabulary=pico.tokens),
        )
        for place in range(9)
    ]
    drafts = speculator(ForcedRuns(), Ngrams(pico.loaded.info.vocab_size)) if drafting else None
    run = run_all(pico.engine(speculator=drafts), rows)
    for row in rows:
        output = run.ids(row.row)
        end = output.index(answer)
        thoughts = [token for token in output[:end] if token not in (opener, closer)]
        assert len(thoughts) == 10
        assert pico.text.decode(output[end + 1 :]).isdigit()
        assert run.finish(row.row) == "stop"
