"""Sources of drafts that tests set, and speculators whose widths or costs are set."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.support.engines import Run, alone, finish, once, runner_of, step
from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest, Sampling
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.costs import WidthCosts
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.speculator import Choice, Guess, Speculator


def rows_of(count: int, tokens: int, prompt: int = 20) -> list[RowRequest]:
    """`count` requests for `tokens` tokens each, with random prompts that are always the same."""
    draw = random.Random(5)
    return [
        RowRequest(row, [draw.randrange(VOCAB_SIZE) for _ in range(prompt)], tokens) for row in range(count)
    ]


def rows_of_unlike_lengths(count: int, tokens: int) -> list[RowRequest]:
    """`count` requests for `tokens` tokens each, with random prompts of 1 to 100 tokens."""
    draw = random.Random(3)
    lengths = (1, 2, 5, 20, 50, 100)
    return [
        RowRequest(row, [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice(lengths))], tokens)
        for row in range(count)
    ]


def sampled_rows(temperature: float) -> list[RowRequest]:
    """Eight requests with random prompts and seeds of their own."""
    draw = random.Random(6)
    return [
        RowRequest(
            row,
            [draw.randrange(VOCAB_SIZE) for _ in range(30 + 3 * row)],
            24,
            seed=row,
            sampling=Sampling(temperature=temperature),
        )
        for row in range(8)
    ]


def come_and_go(engine: Any, rows: Sequence[RowRequest]) -> Run:
    """Insert rows a few steps apart; two of them are parked, and come back at once."""
    run, draw = Run(), random.Random(2)
    for request in rows:
        assert engine.insert([request]) == []
        for _ in range(draw.randrange(4)):
            step(engine, run)
        if request.row in (2, 4):
            engine.park(request.row - 1)
            emitted = run.ids(request.row - 1)
            if not run.ended(request.row - 1):
                engine.insert([replace(rows[request.row - 1], emitted=emitted)])
    finish(engine, run)
    assert run.failures == []
    return run


def converse(engine: Any, model: Any, prompt_tokens: int, tokens: int, cached: Sequence[int]) -> None:
    """A conversation with a turn for each of `cached`, of whose prompt more than that is cached; its answers are those
    of the bare model."""
    draw = random.Random(4)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
    run = Run()
    for turn, least in enumerate(cached):
        request = RowRequest(turn, prompt, tokens)
        assert engine.insert([request]) == []
        finish(engine, run)
        assert run.cached(turn) > least
        assert run.ids(turn) == alone(model, request)
        prompt = [*prompt, *run.ids(turn), *(draw.randrange(VOCAB_SIZE) for _ in range(20))]


def accepted_share(engine: Any, model: Any, batches: Sequence[Sequence[RowRequest]]) -> float:
    """The share of a head's drafts that are accepted; batches come one after another, with the bare model's tokens."""
    run = Run()
    for batch in batches:
        assert engine.insert(batch) == []
        finish(engine, run)
    rows = [row for batch in batches for row in batch]
    assert [run.ids(row.row) for row in rows] == [alone(model, row) for row in rows]
    assert {draft.source for draft in run.drafts} == {"head"}
    return sum(draft.accepted for draft in run.drafts) / sum(draft.proposed for draft in run.drafts)


class Erring:
    """Knows the outputs to come by the prompt and the seed's key, and errs at random; some rows draft, some do not."""

    name = "erring"
    prior = 0.9

    def __init__(
        self,
        outputs: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        right: float = 0.7,
        drafting: float = 0.8,
    ) -> None:
        self.outputs = outputs
        self._right = right
        self._drafting = drafting
        self._random = random.Random(0)

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        return [self.of_row(row, count) for row, count in zip(rows, counts, strict=True)]

    def of_row(self, row: Row, count: int) -> Sequence[int]:
        if self._random.random() >= self._drafting:
            return ()
        output = self.outputs[tuple(row.tokens[: row.prompt_tokens]), row.key]
        made = len(row.tokens) - row.prompt_tokens
        return [token if self._random.random() < self._right else 7 for token in output[made : made + count]]

    def release(self) -> None:
        """It keeps nothing of a row."""

    def clear(self) -> None:
        """It keeps nothing of a row."""


def even_costs(token: float = 0.05, wait: float = 0.0) -> WidthCosts:
    """Every further token costs the same share of a step, whatever this machine does at the moment."""
    return WidthCosts({1 << 20: {1: 1.0} | {width: 1 + wait + token * (width - 1) for width in range(2, 9)}})


def _parted(sources: Sequence[Any]) -> tuple[list[Any], DraftModel | None]:
    models = [source for source in sources if isinstance(source, DraftModel)]
    return [source for source in sources if source not in models], models[0] if models else None


def by_worth(*sources: Any, costs: WidthCosts | None = None) -> Speculator:
    """The speculator of a worker on a machine with such costs."""
    lookups, model = _parted(sources)
    return Speculator(lookups, costs or even_costs(), model=model)


class Widths(Speculator):
    """A block of one of some widths at random in every step, whatever it gains; 1 is none."""

    def __init__(self, sources: Sequence[Any], widths: Sequence[int]) -> None:
        lookups, model = _parted(sources)
        super().__init__(lookups, even_costs(0.0), model=model)
        self.widths = sorted(width for width in set(widths) if width > 1)
        self._choices = widths
        self._random = random.Random(0)

    def choose(
        self, rows: Sequence[Row], guesses: Sequence[Guess], silent: Sequence[int], in_flight: int = 0
    ) -> Choice:
        return Choice(1.0, self._random.choice(self._choices), silent)


def speculator(*sources: Any, widths: Sequence[int] = (1, 2, 3, 6)) -> Speculator:
    """A speculator that follows no costs."""
    return Widths(sources, widths)


class Self(DraftModel):
    """A model that drafts for itself, and is right but for penalties."""

    def __init__(self, model: Any) -> None:
        self._model = model
        super().__init__(runner_of(model), 0, words=VOCAB_SIZE)

    def prepare(self, rows_max: int) -> None:
        """Warm up for the first engine on a model; those after it know what a draft token takes."""

        def warm_up() -> dict[int, float]:
            super(Self, self).prepare(rows_max)
            return self.times.seconds

        self.times.seconds = dict(once(self._model, ("draft", rows_max), warm_up))
