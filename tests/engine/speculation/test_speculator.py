"""When drafts are verified: repeating text takes fewer model calls; other text and other rows lose next to nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.support.drafts import Erring, by_worth, even_costs, rows_of
from tests.support.engines import Run, finish, make_engine, runner_of, step
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.bench.models.small_models import ARCHITECTURES
from zmqengine.engine.host.device import Device
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.models.slot_recurrence import HeldVerifyBlock
from zmqengine.engine.row import Row
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation.acceptance import Acceptance
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.ngrams import Ngrams
from zmqengine.engine.step import width_costs

# As measured on two cores with eight rows.
CPU = even_costs(0.15, 0.3)
BABBLE = Sampling(temperature=10.0, logit_bias=dict.fromkeys(range(10, 14), 100.0))


class Counted:
    """A runner that counts its steps by width, and says 5x + `step` modulo `period` after x, if that is given."""

    def __init__(self, model: Any, period: int = 0, step: int = 7) -> None:
        self._runner = runner_of(model)
        self._period = period
        self._step = step
        self.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, pieces: Any, tokens: Any, width: int, seeing: Any = None) -> Any:
        self.widths[max(piece.samples for piece in pieces)] += 1
        self.tokens += tokens.size
        outputs = self._runner.forward(pieces, tokens, width, seeing)
        if not self._period or outputs.logits is None:
            return outputs
        begins = np.cumsum([piece.count for piece in pieces])
        index = [
            end - piece.samples + min(at, piece.samples - 1)
            for end, piece in zip(begins.tolist(), pieces, strict=True)
            if piece.samples
            for at in range(width)
        ]
        said = ((tokens[mx.array(index)] * 5 + self._step) % self._period).reshape(-1, width, 1)
        logits = outputs.logits
        return outputs._replace(logits=logits + 1000.0 * (mx.arange(logits.shape[-1]) == said))

    def forget(self) -> None:
        self.widths: Counter[int] = Counter()
        self.tokens = 0

    @property
    def calls(self) -> int:
        return self.widths.total()


class Asked:
    """Notes when it is asked. From a length on it guesses, and is wrong."""

    name = "asked"
    prior = 0.9

    def __init__(self, guesses_from: int = 1 << 30) -> None:
        self.lengths: list[int] = []
        self._guesses_from = guesses_from

    def draft(self, rows, counts):
        self.lengths += [len(row.tokens) for row in rows]
        return [
            [(row.tokens[-1] + 1) % VOCAB_SIZE] * count if len(row.tokens) >= self._guesses_from else ()
            for row, count in zip(rows, counts, strict=True)
        ]

    def release(self):
        """It keeps nothing of a row."""

    def clear(self):
        """It keeps nothing of a row."""


def outputs_of(model, rows):
    engine = make_engine(model, rows_max=len(rows))
    engine.insert(rows)
    run = finish(engine)
    return run, {(tuple(one.prompt), seed_key(one.seed)): run.ids(one.row) for one in rows}


def draft_model(model: Any, period: int = 0, step: int = 7) -> tuple[Counted, DraftModel]:
    counted = Counted(model, period, step)
    runner: Any = counted
    return counted, DraftModel(runner, 0, words=VOCAB_SIZE)


@pytest.mark.parametrize("count", [1, 8])
def test_text_that_repeats_takes_a_third_of_the_model_calls(model, count):
    """A period of 16 tokens, from the second time on."""
    counted = Counted(model, 16)
    engine = make_engine(counted, speculator=by_worth(Ngrams(VOCAB_SIZE), costs=CPU), rows_max=8)
    counted.forget()
    engine.insert([RowRequest(row, [row, 100, 101], 200) for row in range(count)])
    run = finish(engine)
    assert all(len(run.ids(row)) == 200 for row in range(count))
    print(f"{count} rows: {counted.calls} calls for 200 tokens each, {dict(counted.widths)}")
    assert counted.calls <= 200 / 3


def test_text_that_never_repeats_costs_no_verify_block(model):
    """Not one in 8 rows of 250 tokens, and no step but those without drafts."""
    counted = Counted(model, 256)
    steps = []
    for speculator in (None, by_worth(Ngrams(VOCAB_SIZE), costs=CPU)):
        engine = make_engine(counted, speculator=speculator, rows_max=8)
        counted.forget()
        engine.insert([RowRequest(row, [300 + row], 250) for row in range(8)])
        assert finish(engine).drafts == []
        steps.append(engine.stats().steps)
    assert set(counted.widths) == {1}
    assert steps[0] == steps[1]


def test_text_that_means_nothing_by_its_repetitions_costs_a_few_verify_blocks(model):
    """Four words at random repeat three of them all the time. Three of 500 steps may be verify blocks."""
    counted = Counted(model)
    engine = make_engine(counted, speculator=by_worth(Ngrams(VOCAB_SIZE), costs=CPU), rows_max=8)
    counted.forget()
    engine.insert([RowRequest(row, [10 + row % 4], 500, sampling=BABBLE, seed=row) for row in range(8)])
    assert finish(engine).failures == []
    blocks = sum(count for width, count in counted.widths.items() if width > 1)
    print(f"{blocks} verify blocks, {counted.calls} calls")
    assert blocks <= 3


def test_a_source_that_is_sure_and_wrong_is_given_up_after_a_few_verify_blocks(model):
    counted = Counted(model)
    source = Asked(guesses_from=0)
    engine = make_engine(counted, speculator=by_worth(source, costs=CPU))
    counted.forget()
    engine.insert([RowRequest(0, [1, 2, 3], 190)])
    finish(engine)
    blocks = sum(count for width, count in counted.widths.items() if width > 1)
    print(f"{blocks} verify blocks")
    assert 0 < blocks <= 4


def test_polls_without_a_prospect_become_rare(model):
    """Each eighth step in the end."""
    source = Asked()
    engine = make_engine(model, speculator=by_worth(source))
    engine.insert([RowRequest(0, [1, 2, 3, 4, 5, 6], 140)])
    finish(engine)
    assert len(set(source.lengths)) <= 140 / 8 + 8
    assert max(after - before for before, after in pairwise(source.lengths)) <= 8


def test_rows_that_join_are_polled_soon(model):
    source = Asked()
    engine = make_engine(model, speculator=by_worth(source), rows_max=2)
    engine.insert([RowRequest(0, [1, 2, 3, 4, 5, 6], 120)])
    for _ in range(60):
        engine.next()
    source.lengths.clear()
    engine.insert([RowRequest(1, [7, 8, 9], 60)])
    for _ in range(6):
        engine.next()
    assert min(source.lengths) <= 3 + 3


def test_a_row_without_drafts_is_not_held_up_much_by_those_of_others(model):
    """Seven rows gain for long where a step of width 8 takes three; the eighth has no drafts."""
    rows, token = rows_of(8, 600, prompt=6), 0.25
    rows[0] = replace(rows[0], max_tokens=120)
    plain, outputs = outputs_of(model, rows)
    alone = tuple(rows[0].prompt)

    class Others(Erring):
        def of_row(self, row, count):
            return () if tuple(row.tokens[:6]) == alone else super().of_row(row, count)

    costs = even_costs(token, 0.3)
    engine = make_engine(model, speculator=by_worth(Others(outputs, 1.0, 1.0), costs=costs), rows_max=8)
    engine.insert(rows)
    run, steps, blocks = Run(), 0.0, 0
    while len(run.ids(0)) < 120:
        before = {row: len(run.ids(row)) for row in range(8)}
        step(engine, run)
        made = max(len(run.ids(row)) - before[row] for row in range(8))
        # A block takes this in plain steps, as the speculator sees it.
        steps += costs.ratio(8, 8) if made > 1 else 1
        blocks += made > 1
    finish(engine, run)
    assert all(run.ids(one.row) == plain.ids(one.row) for one in rows)
    print(f"the row without drafts took {steps:.0f} plain steps for 120 tokens, {blocks} verify blocks")
    assert blocks >= 10
    assert steps <= 1.5 * 120 + 8 + costs.ratio(8, 8)


def test_rows_that_join_all_the_time_do_not_keep_others_from_drafting(model):
    rows = rows_of(16, 40, prompt=6)
    plain, outputs = outputs_of(model, rows)
    known = Erring(outputs, right=1.0, drafting=1.0)
    engine = make_engine(model, speculator=by_worth(known, costs=CPU), rows_max=8)
    run, waiting, steps, row_steps = Run(), list(rows), 0, 0
    while waiting or engine.stats().rows_decoding or engine.stats().rows_prefilling:
        if waiting and steps % 2 == 0 and engine.stats().rows_decoding < 7:
            engine.insert([waiting.pop(0)])
        row_steps += engine.stats().rows_decoding
        step(engine, run)
        steps += 1
    assert all(run.ids(one.row) == plain.ids(one.row) for one in rows)
    assert row_steps < 0.7 * 16 * 40


def test_a_draft_model_that_is_always_wrong_is_given_up_after_a_few_tokens_of_one_row(model):
    """It prefills one prompt of 32, drafts for that row, and is not asked again before thousands of tokens."""
    counted, source = draft_model(build_model(LLAMA, 1))
    engine = make_engine(model, speculator=by_worth(source, costs=CPU), rows_max=32)
    counted.forget()
    rows, run = rows_of(32, 60), Run()
    engine.insert(rows)
    finish(engine, run)
    judged = sum(draft.proposed for draft in run.drafts)
    assert 0 < judged <= 18
    assert len({draft.row for draft in run.drafts}) == 1
    # The target has read 32 prompts and made 1,920 tokens in some 60 calls.
    assert counted.tokens <= 0.02 * (32 * 20 + 32 * 60)
    assert engine.stats().steps <= 70


def test_a_draft_model_is_tried_again_after_ever_more_polls(model):
    """With one row that it never drafts for rightly."""
    _, source = draft_model(build_model(LLAMA, 1), 16, 11)
    speculator = by_worth(source, costs=CPU)
    engine = make_engine(Counted(model, 16), speculator=speculator)
    engine.insert([RowRequest(0, [1, 2, 3], 700)])
    drafted: list[int] = []
    while engine.stats().rows_decoding or engine.stats().rows_prefilling:
        # On a machine with other work a draft may seem to cost too much to be tried.
        source.times.seconds.clear()
        drafted += [engine.stats().steps] * len(engine.next().drafts)
    trials = [drafted[0], *(after for before, after in pairwise(drafted) if after > before + 20)]
    print(f"tried in steps {trials}")
    pauses = [after - before for before, after in pairwise(trials)]
    assert len(pauses) >= 2
    assert pauses[0] >= 60
    assert all(later > 1.8 * earlier for earlier, later in pairwise(pauses))


def test_a_draft_model_that_is_right_drafts_for_all_rows_once_it_has_shown_it(model):
    """One row proves it; then it prefills the other prompts too, several at a time."""
    _, source = draft_model(model)
    engine = make_engine(model, speculator=by_worth(source, costs=even_costs(0.03, 0.3)), rows_max=32)
    # What a draft takes here is the machine's affair.
    source.times.seconds.clear()
    engine.insert(rows_of(8, 60))
    run = finish(engine)
    assert {draft.row for draft in run.drafts} == set(range(8))
    assert engine.stats().steps < 0.6 * 60


def test_a_draft_is_judged_by_what_it_takes_for_as_many_rows(model):
    """What a draft takes for all rows at once keeps no single one from being drafted for."""
    _, source = draft_model(model)
    for rows, seconds in ((1, 0.1), (8, 0.15), (32, 5.0)):
        source.times.begin(rows)
        source.times.add(rows, seconds)
    assert [source.times.of(rows) for rows in (1, 2, 8, 9, 40)] == [0.1, 0.15, 0.15, 5.0, 5.0]
    source.times.add(9, 15.0)
    assert 5.0 < source.times.of(32) < 15.0
    assert source.times.of(8) == 0.15
    speculator = by_worth(source, costs=even_costs(0.1))
    decoding = [Row(request, VOCAB_SIZE, 128) for request in rows_of(9, 60)]
    assert [speculator.choose(decoding[:count], [], range(count)).width for count in (1, 8, 9)] == [4, 4, 1]


def test_costs_are_measured_for_few_and_many_rows(model, monkeypatch):
    """Each width, and not more positions than there is memory for; between two numbers of rows the larger counts."""
    monkeypatch.setattr(width_costs, "_SECONDS_MAX", 60.0)
    monkeypatch.setattr(width_costs, "_TRIES", 1)
    speculator = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts())
    speculator.positions_max = 20 * 4
    make_engine(model, speculator=speculator, rows_max=20)
    costs = speculator.costs
    assert {rows: sorted(seconds) for rows, seconds in costs.seconds.items()} == {
        1: [1, 4, 8], 8: [1, 4, 8], 20: [1, 4],
    }  # fmt: skip
    assert all(0 < second < 1 for seconds in costs.seconds.values() for second in seconds.values())
    assert costs.ratio(1, 4) >= 1
    assert costs.step_s(9) == costs.step_s(20)
    assert costs.ratio(20, 8) == costs.ratio(21, 4) == float("inf")


def test_a_block_costs_what_its_accepted_tokens_take_in_states_that_follow(monkeypatch):
    """The states of recurrent layers take them in at the beginning of the next step."""
    now_s = 0.0
    monkeypatch.setattr(width_costs, "_TRIES_S", 0.0)
    monkeypatch.setattr(width_costs, "time", SimpleNamespace(perf_counter=lambda: now_s))
    apply = HeldVerifyBlock.apply

    def applied(self: HeldVerifyBlock) -> None:
        nonlocal now_s
        now_s += max(piece.accepted() for piece in self._pieces.values())
        apply(self)

    monkeypatch.setattr(HeldVerifyBlock, "apply", applied)
    speculator = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts())
    monkeypatch.setattr(width_costs, "_SECONDS_MAX", 1000.0)
    make_engine(build_model(ARCHITECTURES["qwen3_5"]), speculator=speculator, rows_max=1)
    assert speculator.costs.seconds == {1: {1: 0.0, 4: 4.0, 8: 8.0}}


def test_costs_of_an_earlier_start_are_not_measured_again(model):
    """They are kept as a text, if all were measured in time; a GPU still compiles verify blocks."""
    measured = WidthCosts({1: {1: 0.5, 4: 0.75, 8: 1.0}, 8: {1: 0.5, 4: 1.0}})
    assert measured.has_all((4, 8), 32)
    assert not measured.has_all((4, 8), 64)
    assert not WidthCosts().has_all((4, 8), 64)
    assert WidthCosts.from_text("[1]").seconds == WidthCosts.from_text("").seconds == {}
    counted = Counted(model)
    speculator = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts.from_text(measured.as_text()))
    speculator.positions_max = 32
    make_engine(counted, speculator=speculator, rows_max=8, device=Device(is_gpu=True))
    assert speculator.costs.seconds == measured.seconds
    assert counted.widths[4] > 0 < counted.widths[8]


def test_costs_of_an_earlier_start_on_a_cpu_are_measured_once_more(model):
    """The least counts, of each width: neither start may have had the machine for itself."""
    earlier = WidthCosts({1: {1: 1e-9, 4: 60.0, 8: 60.0}, 8: {1: 60.0, 4: 1e-9, 8: 60.0}})
    counted, first = Counted(model), Counted(model)
    make_engine(first, speculator=by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts()), rows_max=8)
    speculator = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts.from_text(earlier.as_text(), again=True))
    make_engine(counted, speculator=speculator, rows_max=8)
    seconds = speculator.costs.seconds
    assert seconds[1][1] == seconds[8][4] == 1e-9
    assert all(0 < seconds[rows][width] < 60 for rows, width in ((1, 4), (1, 8), (8, 1), (8, 8)))
    # A step at both numbers of rows.
    assert counted.widths[8] == 2 < first.widths[8]


def test_a_spell_of_other_work_while_costs_are_measured_does_not_count(model, monkeypatch):
    """Plain steps that were slow in the first tries made blocks seem free, for as long as the worker ran."""
    now_s = 0.0
    monkeypatch.setattr(width_costs, "_TRIES_S", 2.0)
    monkeypatch.setattr(width_costs, "time", SimpleNamespace(perf_counter=lambda: now_s))

    class Disturbed(Counted):
        def forward(self, pieces: Any, tokens: Any, width: int, seeing: Any = None) -> Any:
            nonlocal now_s
            now_s += 0.05 if width == 1 and self.widths[8] < 5 else 0.01
            return super().forward(pieces, tokens, width, seeing)

    drafting = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts())
    make_engine(Disturbed(model), speculator=drafting, rows_max=1)
    assert drafting.costs.step_s(1) == pytest.approx(0.01)


def test_a_gpu_has_seen_verify_blocks_of_long_rows_before_anybody_asks(model):
    """Their attention has kernels of its own, and to compile one takes seconds."""
    shapes: set[tuple[int, int]] = set()

    class Seen(Counted):
        def forward(self, pieces: Any, tokens: Any, width: int, seeing: Any = None) -> Any:
            shapes.update((width, piece.start) for piece in pieces)
            return super().forward(pieces, tokens, width, seeing)

    drafting = by_worth(Ngrams(VOCAB_SIZE), costs=WidthCosts())
    make_engine(Seen(model), speculator=drafting, rows_max=2, device=Device(is_gpu=True))
    assert shapes >= {(4, 256), (4, 1024)}


def test_an_acceptance_rate_is_a_mean_and_then_a_moving_average():
    rate = Acceptance(0.5, 0.1)
    for _ in range(3):
        rate.judge(1, rejected=False)
    assert rate.rate == pytest.approx((2 * 0.5 + 3) / 5)
    for _ in range(20):
        rate.judge(0, rejected=True)
    assert rate.rate < 0.2
    for _ in range(10):
        rate.judge(8, rejected=False)
    assert rate.rate > 0.99
    assert 6 < rate.expected(7) <= 7
