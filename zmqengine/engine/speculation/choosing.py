"""From the logits of a batch to its tokens: bias and penalties, masks, the draw, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda import drawing
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.penalties import Penalties
from zmqengine.engine.sampling.sampler import LogprobArrays, Plan, choose, measure, plan_draw, widened_places
from zmqengine.engine.speculation.verify_block import VerifyBlock

if TYPE_CHECKING:
    from zmqengine.engine.grammar.mask import MaskFiller


class Choices(NamedTuple):
    """Tokens chosen by a step, [rows] or [rows, width], and log-probabilities of the rows that want them, flattened
    over the width. The host reads `told`, small arrays that a kernel filled, or else the tokens and their `logits`."""

    tokens: mx.array
    logits: mx.array | None
    logprobs: LogprobArrays | None
    told: tuple[mx.array, ...] = ()

    def arrays(self) -> list[mx.array]:
        """Every array of this result, for one evaluation."""
        return [
            array
            for array in (self.tokens, self.logits, *self.told, *(self.logprobs or ()))
            if array is not None
        ]

    def read(self) -> tuple[Any, Any]:
        """Wait for tokens and logits, as lists. A finite logit may be read as 0."""
        if self.logits is not None:
            return self.tokens.tolist(), self.logits.tolist()
        tokens, logits = drawing.read(self.told, self.tokens.size)
        if self.tokens.ndim == 1:
            return tokens, logits
        width = self.tokens.shape[1]
        starts = range(0, len(tokens), width)
        return [tokens[at : at + width] for at in starts], [logits[at : at + width] for at in starts]


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

    def several(self, logits: mx.array, block: VerifyBlock) -> Choices:
        """A token for each position of a verify block, from `logits` [rows, width, vocab], as if all drafts before it
        were accepted."""
        rows, width, vocab = logits.shape
        if self._penalties.index is not None:
            logits = self._penalties.apply_window(logits, block.inputs[:, 1:])
        raw = logits.reshape(-1, vocab)
        flat = self._masked(raw, block) if self.constrained else raw
        tokens, chosen, told = choose(flat, self._plan, width)
        logprobs = None
        if self.measured:
            index = widened_places(mx.array(self._places), width)
            logprobs = measure(raw[index], tokens[index], self._top)
        tokens = tokens.reshape(rows, width)
        if self._penalties.index is not None:
            self._penalties.count_window(tokens, _kept(tokens, block.drafted))
        return Choices(tokens, None if chosen is None else chosen.reshape(rows, width), logprobs, told)

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


def _kept(tokens: mx.array, drafted: mx.array) -> mx.array:
    """Mask [rows, width] of the chosen `tokens` that are output: the first, and each after an accepted draft."""
    first = mx.ones((tokens.shape[0], 1), mx.int32)
    right = drafted == tokens[:, :-1].astype(mx.int32)
    return mx.concatenate([first, mx.cumprod(right.astype(mx.int32), axis=-1)], axis=-1)
