"""Drafts of a model's own head, for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.draft_head import DraftBlock
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw, DrawPlan
from zmqengine.engine.speculation.costs import measured_rows
from zmqengine.engine.speculation.source import WARM_UP_PROMPT, WIDTHS, ModelSource, TokenTimes

WIDTH_MAX = 8
"""Tokens of the widest verify block."""


class HeadDrafts(ModelSource):
    """Drafts of the head of the model that `runner` runs.

    A row samples its draft tokens with the random numbers of its own tokens, so that they agree more often. What the
    head knows of a row is in the row's slot, so nothing is kept here.
    """

    name = "head"
    # As published heads are that know the prompt; one that is worse is given up after a trial.
    prior = 0.8
    byte_count = 0
    # Of many rows a block of more tokens may cost more than the head is right.
    widths = (2, *WIDTHS)

    def __init__(self, runner: SlotRunner, words: int, draw: Draw = PLAIN_DRAW) -> None:
        assert runner.head is not None, "the model has a head"
        self.parameter_bytes = runner.head.parameter_bytes
        self.times = TokenTimes()
        self._words = words
        self._runner = runner
        self._draw = draw
        self._plan: tuple[list[Row], DrawPlan] | None = None

    def passes(self, count: int) -> int:
        """One for a block, which is filled at once."""
        return 1 if isinstance(self._runner.head, DraftBlock) else count

    def trim(self, empty_bytes_max: int, ahead_bytes: int) -> int:
        """Nothing: its keys and values are in the runner's slots."""
        return 0

    def project_bytes(self, tokens: int) -> int:
        """Nothing beyond the runner's slots."""
        return 0

    def prepare(self, rows_max: int) -> None:
        """See `ModelSource`."""
        for count in measured_rows(rows_max):
            rows = [Row(RowRequest(row, WARM_UP_PROMPT, 99), self._words, 128) for row in range(count)]
            for row in rows:
                row.cache = self._runner.open(len(row.tokens) + WIDTH_MAX)
                row.computed_tokens = len(row.tokens) - 1
            pieces = [RowPiece(row, 0, row.computed_tokens) for row in rows]
            tokens = [token for row in rows for token in row.tokens[: row.computed_tokens]]
            mx.eval(self._runner.forward(pieces, mx.array(tokens, mx.uint32), 1).marker)
            for _ in range(2):
                self.times.begin(count)
                self.draft(rows, [WIDTH_MAX - 1] * count)
            self._runner.clear()
            self.clear()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """A draft for each row in decode; none of them is in a step in flight."""
        ready = [row for row, most in zip(rows, counts, strict=True) if most and self._is_ready(row)]
        count = max((most for row, most in zip(rows, counts, strict=True) if row in ready), default=0)
        if not count:
            return [[] for _ in rows]
        started_s = time.perf_counter()
        ready = self._runner.draft_order(ready, count)
        if self._plan is None or self._plan[0] != ready:
            self._plan = ready, self._draw.plan(ready, self._words)
        plan = self._plan[1]
        drafted = self._runner.draft(ready, count, lambda logits, ahead: plan.draw(logits, ahead=ahead)[0])
        self.times.add(len(ready), (time.perf_counter() - started_s) / self.passes(count))
        drafts = dict(zip(ready, drafted, strict=True))
        return [drafts[row][:most] if row in drafts else [] for row, most in zip(rows, counts, strict=True)]

    def release(self) -> None:
        """Drop the plan, which holds rows."""
        self._plan = None

    def clear(self) -> None:
        """See `release`."""
        self._plan = None

    def _is_ready(self, row: Row) -> bool:
        """Whether all is known of the row that the head takes, and one token behind it."""
        if row.cache is None or row.computed_tokens != len(row.tokens) - 1:
            return False
        carries = self._runner.slots.carry is not None
        return not carries or (row.cache.carry is not None and row.cache.carry.place() is not None)
