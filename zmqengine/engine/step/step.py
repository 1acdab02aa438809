"""A step: tokens of rows that are computed in one forward pass, and all that is valid from its launch to its landing.

Theory of operation. `next()` builds a step, launches it, and lands the one before:

    build    the forward pass of all pieces as a lazy graph. The tokens of the step in flight may be inputs: they are on
             the device and need not be known.
    launch   start the forward pass and sample from its logits
    land     wait for the sampled tokens and hand them to their rows

A step is built while the one before computes. Whether it is also launched before that has landed depends on the
runner (`ModelRunner.launches_ahead`). Two things make a step land before the next one is built:

- Draft tokens follow the last token of a row, so a step that may verify some needs the tokens of the one before. A
  rejected token needs no rollback: `Row.computed_tokens` does not count it, and its columns are written again.
- On a CPU the launch computes, so a step is landed at once.

Grammar masks depend on the token before. The forward pass of a step with masks is launched as usual; its tokens are
sampled once the step before has landed and the masks are filled on the host.

Rows may end while a step of theirs is built or in flight. They are marked `gone`, and its results for them are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from zmqengine.engine.interface import (
    EngineFinish,
    RowDraft,
    RowFailure,
    RowToken,
    StepResult,
    TokenLogprobs,
)
from zmqengine.engine.models.model_runner import Outputs, RowPiece
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.row import Row, SampledToken, constraint_failure
from zmqengine.engine.sampling.sampler import LogprobArrays, Sampled, read_logprobs
from zmqengine.engine.speculation.verify_block import VerifyBlock

NOT_A_NUMBER = "the model's output for this row is not a number"


class Forced(NamedTuple):
    """Forced tokens that a step has passed, and their log-probabilities on the device if the row wants any."""

    row: Row
    tokens: list[int]
    logprobs: LogprobArrays | None


class Landed(NamedTuple):
    """The outcome of a landed step: rows that failed, rows with their last token, and rows whose first logit was not
    finite. `accepted`: accepted draft tokens of each row of the verify block."""

    failed: list[Row]
    ended: list[Row]
    doubtful: set[Row]
    accepted: list[int]


@dataclass(eq=False)
class Step:
    """One step of `pieces`. `rows` are those that sample, in the order of their pieces: first the `decoding` ones.

    `block`: draft tokens of the rows in decode; None for a plain step. `offers`: blocks for the prefix cache, which the
    logit of their row validates. `copies`: those that the device copies before this step. `texts`:
    pooled states of texts.
    """

    pieces: list[RowPiece]
    rows: list[Row]
    decoding: int
    block: VerifyBlock | None = None
    outputs: Outputs | None = None
    sampled: Sampled | None = None
    forced: list[Forced] = field(default_factory=list)
    offers: list[tuple[Row, Offer]] = field(default_factory=list)
    copies: list[Offer] = field(default_factory=list)
    texts: list[tuple[list[Row], mx.array]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Most tokens of a row that are sampled."""
        return 1 if self.block is None else self.block.width

    @property
    def is_masked(self) -> bool:
        """Whether a row has a grammar."""
        return any(row.matcher is not None for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts and texts."""
        return sum(piece.count for piece in self.pieces[self.decoding :])

    def tokens(self, previous: Step | None) -> mx.array:
        """The tokens of all pieces; those that `previous` has sampled are on the device."""
        known: list[int] = []
        ahead: list[int] = []
        flight = {} if previous is None else {row: index for index, row in enumerate(previous.rows)}
        for number, piece in enumerate(self.pieces):
            row = piece.row
            if piece.start == len(row.tokens):
                ahead.append(len(known))
                known.append(flight[row])
                continue
            known += row.tokens[piece.start : piece.start + piece.count]
            if self.block is not None and number < self.decoding:
                known += self.block.draft_tokens[number]
        if not ahead:
            return mx.array(known, mx.uint32)
        assert previous is not None, "the tokens of a row in flight are known to its step"
        assert previous.sampled is not None, "a step is sampled before the next one is built"
        sampled = previous.sampled.tokens.astype(mx.uint32)
        if len(ahead) == len(known) and known == list(range(sampled.size)):
            return sampled
        index = np.arange(sampled.size, sampled.size + len(known), dtype=np.int32)
        index[ahead] = [known[at] for at in ahead]
        return mx.concatenate([sampled, mx.array(known, mx.uint32)])[mx.array(index)]

    def drafted(self) -> mx.array | None:
        """The draft tokens [rows, width - 1], -1 where there is none, which equals no token."""
        if self.block is None:
            return None
        drafted = np.full((len(self.rows), self.width - 1), -1, np.int32)
        for index, tokens in enumerate(self.block.draft_tokens):
            drafted[index, : len(tokens)] = tokens
        return mx.array(drafted)

    def read_row(self, row: Row) -> SampledToken | None:
        """Wait for the token of one row of a plain step; None if its logit is not finite."""
        assert self.sampled is not None, "a step is sampled before anybody reads it"
        index = self.rows.index(row)
        tokens, logits = self.sampled.read()
        if not math.isfinite(logits[index]):
            return None
        return SampledToken(tokens[index], self.sampled.read_logprobs().get((row.id, 0)))

    def land(self, result: StepResult) -> Landed:
        """Wait for the tokens and hand them to the rows that are not gone.

        A row of a verify block gets its accepted draft tokens and the token after them.
        """
        landed = Landed([], [], set(), [])
        self._report_forced(result, landed)
        if self.sampled is None:
            if self.outputs is not None:
                mx.eval(self.outputs.marker)
            return landed
        tokens, logits = self.sampled.read()
        logprobs = self.sampled.read_logprobs() if self.sampled.logprobs is not None else {}
        width = self.width
        for index, row in enumerate(self.rows):
            first = index * width
            drafts = self._drafts(index)
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == tokens[first + accepted]:
                accepted += 1
            if self.block is not None and index < self.decoding:
                landed.accepted.append(0 if row.gone else accepted)
            if not math.isfinite(logits[first]):
                landed.doubtful.add(row)
            if not row.gone:
                self._report(row, index, accepted, tokens[first:], logits[first:], logprobs, result, landed)
        return landed

    def _drafts(self, index: int) -> Sequence[int]:
        return () if self.block is None or index >= self.decoding else self.block.draft_tokens[index]

    def _report(
        self,
        row: Row,
        index: int,
        accepted: int,
        tokens: Sequence[int],
        logits: Sequence[float],
        logprobs: Mapping[tuple[int, int], TokenLogprobs],
        result: StepResult,
        landed: Landed,
    ) -> None:
        """Hand the accepted draft tokens of a row and the token after them to it."""
        taken = 0
        failure: RowFailure | None = None
        finish: EngineFinish | None = None
        for at in range(accepted + 1):
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
        row.is_finite = failure is None
        if self.block is not None and index < self.decoding:
            row.computed_tokens += taken
            row.sampled += taken
            draft = self.block.drafts[index]
            if draft is not None:
                proposed = len(draft.tokens)
                result.drafts.append(RowDraft(row.id, draft.source, proposed, min(accepted, taken)))
        if failure is not None:
            row.leave()
            landed.failed.append(row)
            result.failures.append(failure)
        elif finish is not None:
            row.leave()
            landed.ended.append(row)

    def _report_forced(self, result: StepResult, landed: Landed) -> None:
        """Report the forced tokens that the step has passed."""
        for row, tokens, arrays in self.forced:
            if row.gone:
                continue
            entries = [None] * len(tokens) if arrays is None else read_logprobs(arrays)
            if any(entry is not None and not math.isfinite(entry.logprob) for entry in entries):
                row.leave()
                landed.failed.append(row)
                result.failures.append(RowFailure(row.id, NOT_A_NUMBER))
                continue
            row.unreported -= len(tokens)
            result.forced += len(tokens)
            result.tokens += [RowToken(row.id, *each, None) for each in zip(tokens, entries, strict=True)]
            if not row.unreported and row not in self.rows and row.sampled >= row.max_tokens:
                # All of its output is forced.
                row.leave()
                landed.ended.append(row)
                result.tokens[-1] = result.tokens[-1]._replace(finish="length")


def _not_a_number(row: Row) -> RowFailure:
    if row.matcher is not None and row.matcher.error:
        return constraint_failure(row.id, row.matcher.error)
    return RowFailure(row.id, NOT_A_NUMBER)
