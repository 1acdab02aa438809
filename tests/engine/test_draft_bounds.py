"""What drafts may cost: the host that looks for them, the batch, and each row that has none."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support.drafts import Erring, EvenCosts, by_worth, rows_of
from tests.support.engines import Run, finish, make_engine, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation.allowance import Allowance
from zmqengine.engine.speculation.policy import GAIN_NEAR, BestWidth
from zmqengine.engine.speculation.source import Outlook
from zmqengine.engine.speculation.step_costs import WAITED, StepClock, StepCosts


class Asked:
    """Counts how often it is asked. From a length on it is sure of what comes, and wrong."""

    name = "asked"

    def __init__(self, sure_from: int = 1 << 30) -> None:
        self.times: list[int] = []
        self._sure_from = sure_from

    def follow(self, row):
        self.times.append(len(row.tokens))
        return Outlook(0.9, 0.9, 8) if len(row.tokens) >= self._sure_from else None

    def propose(self, rows, tokens_max):
        return [
            [(row.tokens[-1] + 1) % VOCAB_SIZE] * most for row, most in zip(rows, tokens_max, strict=True)
        ]

    def judged(self, row, proposed, accepted):
        """It does not learn."""


def outputs_of(model, rows):
    engine = make_engine(model, rows_max=len(rows))
    engine.insert(rows)
    run = finish(engine)
    return run, {(tuple(one.prompt), seed_key(one.seed)): run.ids(one.row) for one in rows}


def test_a_row_that_has_nothing_to_draft_is_asked_ever_more_seldom(model):
    """Each eighth step in the end; and whoever has something is asked at each."""
    source = Asked(sure_from=150)
    engine = make_engine(model, speculation=by_worth(source, costs=EvenCosts(0.03)))
    engine.insert([RowRequest(0, [1, 2, 3, 4, 5, 6], 190)])
    finish(engine)
    early = [at for at in source.times if at < 150]
    assert len(set(early)) <= 144 / 8 + 8
    assert max(after - before for before, after in pairwise(early)) <= 8
    sure = sorted({at for at in source.times if at >= 150})
    # Until its wrong drafts have cost what they may.
    assert sure[:3] == list(range(sure[0], sure[0] + 3))


def test_rows_that_come_are_asked_soon(model):
    source = Asked()
    engine = make_engine(model, speculation=by_worth(source, costs=EvenCosts(0.03)), rows_max=2)
    engine.insert([RowRequest(0, [1, 2, 3, 4, 5, 6], 120)])
    for _ in range(60):
        engine.next()
    source.times.clear()
    engine.insert([RowRequest(1, [7, 8, 9], 60)])
    for _ in range(6):
        engine.next()
    assert min(source.times) <= 3 + 3


def test_what_it_takes_to_look_for_drafts_is_taken_from_what_they_may_cost(model, monkeypatch):
    """On a machine where to ask takes as long as a step, nobody is asked at more than a step in a hundred."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(Asked):
        def follow(self, row):
            now[0] += 0.01
            return super().follow(row)

    class Timed(EvenCosts):
        def measured(self, rows, seconds):
            """Time stands still while the start is measured."""

        def single_s(self, rows):
            return 0.01

    costs = Timed(0.03)
    source = Slow()
    engine = make_engine(model, speculation=by_worth(source, costs=costs))
    engine.insert([RowRequest(0, [1, 2, 3], 200), RowRequest(1, [4, 5, 6], 200)])
    finish(engine)
    # Eight steps at first, and two rows are asked at once.
    assert 0 < len(source.times) <= 8 + 0.01 * 200 + 2


def test_asking_uses_up_the_allowance_and_steps_save_it_again():
    allowance = Allowance()
    for _ in range(8):
        allowance.save(asking=1.0)
    assert not allowance.is_spent
    allowance.save(asking=1.0)
    assert allowance.is_spent
    for _ in range(100):
        allowance.save()
    assert not allowance.is_spent


def test_a_row_without_drafts_is_not_held_up_much_by_those_of_others(model):
    """Seven rows gain for long where a step of width 8 takes three; the eighth has no drafts."""
    rows, token = rows_of(8, 600, prompt=6), 0.25
    rows[0] = replace(rows[0], max_tokens=120)
    plain, outputs = outputs_of(model, rows)
    alone = tuple(rows[0].prompt)

    class Others(Erring):
        def follow(self, row):
            return None if tuple(row.tokens[:6]) == alone else super().follow(row)

    engine = make_engine(
        model, speculation=by_worth(Others(outputs, 1.0, 1.0), costs=EvenCosts(token, 0.3)), rows_max=8
    )
    engine.insert(rows)
    run, steps, windows = Run(), 0.0, 0
    while len(run.ids(0)) < 120:
        before = {row: len(run.ids(row)) for row in range(8)}
        step(engine, run)
        made = max(len(run.ids(row)) - before[row] for row in range(8))
        # A step of as many tokens takes this, as the policy sees it.
        steps += 1 + (0.3 + token * 7 if made > 1 else 0)
        windows += made > 1
    finish(engine, run)
    assert all(run.ids(one.row) == plain.ids(one.row) for one in rows)
    assert windows >= 10
    # Else it would wait for a window with each of its tokens.
    assert windows <= 60
    assert steps <= 1.5 * 120 + 8 + 8 * 7


def test_what_rows_without_drafts_lose_counts_more():
    """One of eight gains more than the seven lose, but not three times as much."""
    policy, sure = BestWidth(EvenCosts(0.07), 1 << 20), [Outlook(1.0, 0.95, 8)]
    assert policy.choose(8, sure, 0).width == 8
    assert policy.choose(8, sure, 0, idle=7).width == 1
    assert policy.choose(8, sure * 4, 0, idle=4).width == 8
    assert policy.choose(1, sure, 0).width == 8


def test_rows_that_are_ahead_let_others_draft(model):
    """Who has gained by drafts before gives some of it back, where who never drafted need not wait for others."""
    rows, drafting = rows_of(8, 120, prompt=6), 60
    plain, outputs = outputs_of(model, rows)
    alone = tuple(rows[0].prompt)

    class Others(Erring):
        """All but the first row have drafts for so many tokens."""

        until = 0

        def follow(self, row):
            mine = tuple(row.tokens[:6]) == alone
            return super().follow(row) if mine or len(row.tokens) < 6 + self.until else None

    drafted = []
    for until in (0, drafting):
        source = Others(outputs, 1.0, 1.0)
        source.until = until
        engine = make_engine(model, speculation=by_worth(source, costs=EvenCosts(0.07)), rows_max=8)
        engine.insert(rows)
        run, windows = Run(), 0
        while len(run.ids(0)) < 120:
            before = len(run.ids(0))
            step(engine, run)
            windows += before > drafting and len(run.ids(0)) > before + 1
        finish(engine, run)
        assert all(run.ids(one.row) == plain.ids(one.row) for one in rows)
        drafted.append(windows)
    never, ahead = drafted
    assert never == 0
    assert ahead >= 5


def test_the_wait_before_windows_is_shared_by_all_that_follow_each_other():
    """Where ten do, drafts begin that would not be worth the wait for one; where one does, they are not again."""
    costs = StepCosts()
    costs.measured(8, {1: 1.0, WAITED: 1.9, 2: 1.6, 3: 2.2, 5: 2.5, 8: 5.0})
    policy, outlooks = BestWidth(costs, 1 << 20), [Outlook(0.8, 0.9, 8)] * 8
    assert costs.wait(8) == pytest.approx(0.9)
    assert policy.choose(8, outlooks, 1).width == 1
    for windows, width in ((10, 5), (1, 1)):
        for _ in range(20):
            for _ in range(windows):
                costs.passed(5)
            costs.passed(None)
            costs.passed(WAITED)
        assert costs.wait(8) == pytest.approx(0.9 / windows, rel=0.05)
        assert policy.choose(8, outlooks, 1).width == width


def test_a_width_that_cannot_gain_is_told_without_looking_closely():
    """What is said of it is no less than what it could do."""

    class Close(Outlook):
        def accepted(self, tokens, ahead=0):
            raise AssertionError("nobody has to ask")

    costs = EvenCosts(1.0)
    choice = BestWidth(costs, 1 << 20).choose(4, [Close(0.2, 0.9, 8)], 0)
    assert choice.width == 1
    assert choice.gain < GAIN_NEAR
    likely = Outlook(0.2, 0.9, 8)
    assert all(
        (4 + likely.accepted(width - 1)) / 4 / costs.ratio(4, width) <= choice.gain for width in (2, 3, 5, 8)
    )


def test_a_step_that_nobody_looks_at_is_not_timed():
    costs = StepCosts()
    clock = StepClock(costs)
    clock.landed(1, 1)
    clock.skip()
    assert costs.single_s(1) is None
    clock.landed(1, 1)
    assert costs.single_s(1) is not None


def test_what_is_remembered_of_a_ratio_is_forgotten_when_a_step_is_timed():
    costs = StepCosts()
    costs.measured(1, {1: 1.0, 2: 1.2})
    assert costs.ratio(1, 2) == 1.2
    for _ in range(7):
        costs.note(1, 1, 1.0)
        costs.note(1, 2, 1.8)
    assert costs.ratio(1, 2) == 1.8
