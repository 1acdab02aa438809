"""Sources of drafts that tests set, and widths that follow no costs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.models import VOCAB_SIZE
from zmqengine.engine.interface import RowRequest
from zmqengine.engine.load.probe import probe
from zmqengine.engine.row import Row
from zmqengine.engine.speculation.draft_model import DraftModel
from zmqengine.engine.speculation.policy import BestWidth, Choice
from zmqengine.engine.speculation.source import Outlook
from zmqengine.engine.speculation.speculation import Speculation
from zmqengine.engine.speculation.step_costs import WAITED, StepClock, StepCosts


def rows_of(count: int, tokens: int, prompt: int = 20) -> list[RowRequest]:
    """Requests for so many tokens, with random prompts that are always the same."""
    draw = random.Random(5)
    return [
        RowRequest(row, [draw.randrange(VOCAB_SIZE) for _ in range(prompt)], tokens) for row in range(count)
    ]


class Erring:
    """Knows the outputs to come by the prompt and the seed's key, and errs at random; some rows draft, some do not."""

    name = "erring"

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

    def follow(self, row: Row) -> Outlook | None:
        return Outlook(1.0, 0.9, 64) if self._random.random() < self._drafting else None

    def propose(self, rows: Sequence[Row], tokens_max: Sequence[int]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = []
        for row, count in zip(rows, tokens_max, strict=True):
            output = self.outputs[tuple(row.tokens[: row.prompt_tokens]), row.key]
            made = len(row.tokens) - row.prompt_tokens
            drafts.append(
                [token if self._random.random() < self._right else 7 for token in output[made : made + count]]
            )
        return drafts

    def judged(self, row: Row, proposed: int, accepted: int) -> None:
        """It knows."""


class RandomWidth:
    """Another width at every step, 1 among them."""

    width_max = 6
    positions_max = 1 << 20

    def __init__(self, widths: Sequence[int] = (1, 2, 3, 6)) -> None:
        self._random = random.Random(0)
        self.widths = widths

    def prepare(self, model, rows_max: int) -> None:
        """Nothing is measured."""

    def is_hopeless(self, rows: int) -> bool:
        return False

    def choose(self, rows: int, outlooks: Sequence[Outlook], ahead: int, *, idle: int = 0) -> Choice:
        return Choice(self._random.choice(self.widths), 1.0)


class FixedWidth(RandomWidth):
    """Always the same."""

    def __init__(self, width: int) -> None:
        super().__init__([width])
        self.width_max = width


class EvenCosts(StepCosts):
    """Every further token costs the same share of a step, whatever this machine does at the moment."""

    def __init__(self, token: float = 0.05, wait: float = 0.0) -> None:
        super().__init__()
        self._token = token
        self._wait = wait

    def is_current(self, rows: int) -> bool:
        return True

    def ratio(self, rows: int, width: int) -> float:
        return 1 + (self._wait if width == WAITED else self._wait + self._token * (width - 1))

    def single_s(self, rows: int) -> float | None:
        return None


def by_worth(*sources, costs: StepCosts | None = None) -> Speculation:
    """The policy of a worker on a machine with such costs."""
    costs = costs or EvenCosts()
    models = [source for source in sources if isinstance(source, DraftModel)]
    policy = BestWidth(costs, 1 << 20)
    return Speculation(sources, policy, StepClock(costs), *models)


def speculation(*sources, policy=None) -> Speculation:
    models = [source for source in sources if isinstance(source, DraftModel)]
    return Speculation(sources, policy or RandomWidth(), StepClock(EvenCosts(0.0)), *models)


class Self(DraftModel):
    """A model that drafts for itself, and is right but for penalties."""

    def __init__(self, model: Any, padding_bytes_max: int = 1 << 30) -> None:
        super().__init__(model, 0, probe(model).shape, words=VOCAB_SIZE, padding_bytes_max=padding_bytes_max)
