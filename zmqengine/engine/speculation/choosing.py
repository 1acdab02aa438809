"""From the logits of a batch to its tokens: bias and penalties, masks, the draw, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from zmqengine.engine.row import Row
from zmqengine.engine.sampling.penalties import Penalties
from zmqengine.engine.sampling.sampler import Plan, choose, measure, plan_draw
from zmqengine.engine.speculation.verify_block import Choices, Measured, VerifyBlock

if TYPE_CHECKING:
    from zmqengine.engine.grammar.mask import MaskFiller


class Choosing:
    """How the rows of a batch choose, kept as arrays while the batch stays as it is; `measured` want log-probabilities.

    While some are `constrained` by a grammar, all tokens before those that are chosen must be known. Their masks of
    `masks` are filled here, on the host: whoever wants the device to compute meanwhile has started the logits.
    """

    def __init__(self, vocab_size: int, masks: MaskFiller) -> None:
        self.constrained = False
        self.measured: list[Row] = []
        self._vocab_size = vocab_size
        self._masks = masks
        self._rows: list[Row] = []
        self._plan: Plan = None
        self._penalties = Penalties(vocab_size)
        self._places: list[int] = []
        self._index: mx.array | None = None

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Follow a change of the batch."""
        self._rows = list(rows)
        self._plan = plan_draw(rows, self._vocab_size)
        self._penalties.set_rows(rows)
        self.constrained = any(row.matcher is not None for row in rows)
        self._places = [place for place, row in enumerate(rows) if row.logprobs is not None]
        self.measured = [rows[place] for place in self._places]
        self._index = None if len(self._places) == len(rows) else mx.array(self._places)

    def one(self, logits: mx.array) -> Choices:
        """A token for each row of `logits` [rows, vocab]."""
        if self._penalties.index is not None:
            logits = self._penalties.apply(logits)
        allowed = self._masked(logits) if self.constrained else logits
        tokens, chosen_logits, told = choose(allowed, self._plan)
        if self._penalties.index is not None:
            self._penalties.count(tokens)
        logprobs = None
        if self.measured:
            some = self._index
            logprobs = measure(
                logits if some is None else logits[some],
                tokens if some is None else tokens[some],
                self._top,
            )
        return Choices(tokens, chosen_logits, logprobs, told)

    def several(self, logits: mx.array, window: VerifyBlock) -> Choices:
        """A token for each place of a window, from `logits` [rows, width, vocab]."""

        def mask(flat: mx.array) -> mx.array:
            return self._masked(flat, window) if self.constrained else flat

        return window.choose(logits, self._plan, self._penalties, Measured(self._places, self._top), mask)

    @property
    def _top(self) -> int:
        return max((row.logprobs or 0 for row in self.measured), default=0)

    def _masked(self, logits: mx.array, window: VerifyBlock | None = None) -> mx.array:
        # A row may have ended since the logits were started, and nobody takes what is chosen for it.
        matchers = [None if row.gone else row.matcher for row in self._rows]
        if not any(matchers):
            return logits
        if window is None:
            return self._masks.apply(logits, self._masks.fill(matchers))
        drafts = [() if draft is None else draft.tokens for draft in window.drafts]
        return self._masks.apply(logits, self._masks.fill_windows(matchers, drafts, window.width))
