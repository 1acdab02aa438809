"""A step in flight, and how its tokens are handed to rows when it lands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from zmqengine.engine.interface import EngineFinish, RowDraft, RowFailure, RowToken, StepResult
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.row import Row, SampledToken, constraint_failure
from zmqengine.engine.sampling.sampler import Sampled
from zmqengine.engine.speculation.verify_block import VerifyBlock


@dataclass
class Landed:
    """The outcome of a landed step.

    `doubtful`: rows whose logits were not finite. `failed`: rows that left with an error. `ended`: rows with their last
    token. `accepted`: accepted draft tokens of each row of a verify block.
    """

    doubtful: set[Row]
    failed: set[Row] = field(default_factory=set)
    ended: list[Row] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(eq=False)
class InflightStep:
    """One step in flight: `logits` [rows, width, vocab] of `rows`, in batch order, and the tokens `sampled` from them.

    `block`: the verify block, None for a plain step. `is_first`: some row gets its first token. `is_masked`: some row
    has a grammar. `offers`: blocks for the prefix cache, which the logit of their row validates.
    """

    rows: list[Row]
    logits: mx.array
    block: VerifyBlock | None = None
    is_first: bool = False
    is_masked: bool = False
    offers: list[tuple[Row, Offer]] = field(default_factory=list)
    sampled: Sampled | None = None

    @property
    def width(self) -> int:
        """Tokens that the step reads of each row."""
        return 1 if self.block is None else self.block.width

    def read_row(self, row: Row) -> SampledToken | None:
        """Wait for the token of one row of a plain step; None if its logit is not finite."""
        assert self.sampled is not None, "a step is sampled before anybody reads it"
        index = self.rows.index(row)
        tokens, logits = self.sampled.read()
        if not math.isfinite(logits[index]):
            return None
        return SampledToken(tokens[index], self.sampled.read_logprobs().get((row.id, 0)))

    def report(self, result: StepResult) -> Landed:
        """Wait for the tokens and hand them to the rows that are not gone.

        A row of a verify block gets its accepted draft tokens and the token after them.
        """
        assert self.sampled is not None, "a step is sampled before it lands"
        tokens, logits = self.sampled.read()
        logprobs = self.sampled.read_logprobs() if self.sampled.logprobs is not None else {}
        block, width = self.block, self.sampled.width
        landed = Landed(set())
        if not math.isfinite(sum(logits)):
            landed.doubtful = _not_finite(self.rows, logits[::width])
        for index, row in enumerate(self.rows):
            first = index * width
            accepted = 0 if block is None else block.accepted(index, tokens[first : first + width])
            if block is not None:
                landed.accepted.append(0 if row.gone else accepted)
            if row.gone:
                continue
            taken = 0
            failure: RowFailure | None = None
            finish: EngineFinish | None = None
            for at in range(first, first + accepted + 1):
                if not math.isfinite(logits[at]):
                    failure = _not_a_number(row)
                    break
                try:
                    finish = row.take(tokens[at])
                except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
                    failure = constraint_failure(row.id, error)
                    break
                result.tokens.append(RowToken(row.id, tokens[at], logprobs.get((row.id, taken)), finish))
                taken += 1
                if finish is not None:
                    break
            if block is not None:
                row.computed_tokens += taken
                row.sampled += taken
                draft = block.drafts[index]
                if draft is not None:
                    drafted = len(draft.tokens)
                    result.drafts.append(RowDraft(row.id, draft.source, drafted, min(accepted, taken)))
            if failure is not None:
                row.leave()
                landed.failed.add(row)
                result.failures.append(failure)
            elif finish is not None:
                row.leave()
                landed.ended.append(row)
        return landed


def _not_a_number(row: Row) -> RowFailure:
    if row.matcher is not None and row.matcher.error:
        return constraint_failure(row.id, row.matcher.error)
    return RowFailure(row.id, "the model's output for this row is not a number")


def _not_finite(rows: Sequence[Row], first_logits: Sequence[float]) -> set[Row]:
    """Rows whose first sampled logit is not finite."""
    return {row for row, logit in zip(rows, first_logits, strict=True) if not math.isfinite(logit)}
