"""Who drafts has shown that it is worth it, and rows that come all the time do not keep others from drafting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.drafts import Erring, EvenCosts, by_worth, rows_of
from tests.support.engines import Run, finish, make_engine, step
from tests.support.models import LLAMA, VOCAB_SIZE, build_model
from zmqengine.engine.load.probe import probe
from zmqengine.engine.seeds import seed_key
from zmqengine.engine.speculation import start_costs
from zmqengine.engine.speculation.allowance import Allowance
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.step_costs import WAITED, StepCosts


class Counted:
    """A model that counts its calls, and the tokens that it reads."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls = self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        self.calls += 1
        self.tokens += inputs.size
        return self._model(inputs, **options)


def draft_model(model: Any) -> tuple[Counted, DraftModel]:
    counted = Counted(model)
    shape = probe(model).shape
    return counted, DraftModel(counted, 0, shape, words=VOCAB_SIZE, padding_bytes_max=1 << 30)


def test_a_draft_model_that_is_always_wrong_is_given_up_after_a_few_tokens_of_one_row(model):
    """It reads one prompt of 32, drafts for that row, and is not asked again before thousands of tokens."""
    counted, source = draft_model(build_model(LLAMA, 1))
    engine = make_engine(model, speculation=by_worth(source, costs=EvenCosts(0.03, 0.3)), rows_max=32)
    counted.calls = counted.tokens = 0
    rows, run = rows_of(32, 60), Run()
    engine.insert(rows)
    finish(engine, run)
    judged = sum(draft.proposed for draft in run.drafts)
    assert 0 < judged <= 12
    assert len({draft.row for draft in run.drafts}) == 1
    # The target has read 32 prompts and made 1,920 tokens in some 60 calls.
    assert counted.tokens <= 0.02 * (32 * 20 + 32 * 60)
    assert counted.calls <= 15
    assert engine.stats().steps <= 65


def test_what_was_gained_once_is_not_lost_for_ever_after():
    """A text that has repeated itself a thousand times may stop doing so: drafts end after a few that fail."""
    allowance = Allowance()
    for _ in range(1000):
        allowance.bet(5, 1)
    lost = 0
    while not allowance.is_spent:
        allowance.bet(0, 1)
        lost += 1
    assert lost <= 40


def test_a_draft_model_that_is_right_drafts_for_all_rows_once_it_has_shown_it(model):
    """One row proves it; then it reads the other prompts too, several at a time."""
    _, source = draft_model(model)
    engine = make_engine(model, speculation=by_worth(source, costs=EvenCosts(0.03, 0.3)), rows_max=32)
    engine.insert(rows_of(8, 60))
    run = finish(engine)
    assert {draft.row for draft in run.drafts} == set(range(8))
    assert engine.stats().steps < 0.6 * 60


def test_rows_that_join_all_the_time_do_not_keep_others_from_drafting(model):
    """No step can be timed; what was measured at the start decides."""
    costs = Untimed()
    rows = rows_of(16, 40, prompt=6)
    reference = make_engine(model, rows_max=16)
    reference.insert(rows)
    plain = finish(reference)
    outputs = {(tuple(one.prompt), seed_key(one.seed)): plain.ids(one.row) for one in rows}
    known = Erring(outputs, right=1.0, drafting=1.0)
    engine = make_engine(model, speculation=by_worth(known, costs=costs), rows_max=8)
    run, waiting, steps, row_steps = Run(), list(rows), 0, 0
    while waiting or engine.stats().rows_decoding or engine.stats().rows_prefilling:
        if waiting and steps % 2 == 0 and engine.stats().rows_decoding < 7:
            engine.insert([waiting.pop(0)])
        row_steps += engine.stats().rows_decoding
        step(engine, run)
        steps += 1
    assert all(run.ids(one.row) == plain.ids(one.row) for one in rows)
    assert row_steps < 0.7 * 16 * 40


def test_a_gpu_has_seen_windows_of_long_rows_before_anybody_asks(model, monkeypatch):
    """Their attention has kernels of its own, and to compile one takes seconds."""
    monkeypatch.setattr(start_costs, "on_gpu", lambda: True)
    counted, shapes = Counted(model), []

    def call(self: Any, inputs: Any, **options: Any) -> Any:
        cache = options["cache"][0]
        shapes.append((*inputs.shape, 0 if cache.keys is None else cache.size()))
        return self._model(inputs, **options)

    monkeypatch.setattr(Counted, "__call__", call)
    start_costs.measure_widths(counted, StepCosts(), 2, 64, (2, 3))
    assert [shape for shape in shapes if shape[1] == 2 and shape[2] >= 256] == [(1, 2, 256), (1, 2, 1024)]


class Untimed(StepCosts):
    """What a start has measured, in seconds that no real draft takes a share of. Nothing is learnt from then on."""

    def __init__(self) -> None:
        super().__init__()
        super().measured(8, {WAITED: 1300.0, 1: 1000.0, 2: 1320.0, 3: 1340.0, 5: 1380.0, 8: 1440.0})

    def measured(self, rows: int, seconds: Mapping[int, float]) -> None:
        """Not."""

    def note(self, rows: int, width: int, seconds: float) -> None:
        """Not."""
