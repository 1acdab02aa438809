"""An in-flight step, and how its tokens are handed to rows when it lands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from zmqengine.engine.cuda.resident import resident
from zmqengine.engine.interface import EngineFinish, RowDraft, RowFailure, RowToken, StepResult, TokenLogprobs
from zmqengine.engine.prefix_cache.offers import Offer
from zmqengine.engine.row import MadeToken, Row
from zmqengine.engine.speculation.choosing import Choices
from zmqengine.engine.speculation.verify_block import VerifyBlock


@dataclass
class Landed:
    """The outcome of a landed step. Rows are named by `id()`: `doubtful` ones had logits that are not finite, `failed`
    ones left the batch with an error, `ended` ones with their last token.

    `accepted`: draft tokens of each row of a verify block that were accepted.
    """

    doubtful: set[int]
    failed: set[int] = field(default_factory=set)
    ended: list[Row] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass
class InflightStep:
    """One step in flight for `rows`, in batch order; with a `window` a verify block of [rows, width].

    `measured`: rows that want log-probabilities. `offers`: blocks for the prefix cache with the row whose logit
    validates them. `is_first`: some row gets its first token. `logits` until the tokens are chosen, `choices` from then
    on.
    """

    rows: list[Row]
    measured: list[Row]
    offers: list[tuple[Row, Offer]]
    window: VerifyBlock | None = None
    is_first: bool = False
    logits: mx.array | None = None
    choices: Choices | None = None

    @property
    def width(self) -> int:
        """Tokens that the step reads of each row."""
        return 1 if self.window is None else self.window.width

    def made(self, row: Row) -> MadeToken | None:
        """Wait for the token of one row of a width-1 step; None if its logit is not finite."""
        place = self.rows.index(row)
        tokens, logits = self._chosen.read()
        return (
            MadeToken(tokens[place], self._logprobs().get((row.id, 0)))
            if math.isfinite(logits[place])
            else None
        )

    def land(self, result: StepResult) -> Landed:
        """Wait for the tokens and hand them to the rows that are not gone."""
        tokens, logits = self._chosen.read()
        return (
            self._take(tokens, logits, result)
            if self.window is None
            else self._take_window(tokens, logits, result)
        )

    def last_tokens(self, here: Sequence[Row]) -> mx.array | None:
        """Tokens on the device of this step's rows that are in `here`, in that order; None if there are none."""
        places = self._places(here)
        if len(places) == len(self.rows):
            return self._chosen.tokens
        return self._chosen.tokens[resident(places)] if places else None

    def _places(self, here: Sequence[Row]) -> list[int]:
        """Indices into `self.rows` of the rows in `here` that belong to this step, in the order of `here`."""
        places = {id(row): place for place, row in enumerate(self.rows)}
        return [places[id(row)] for row in here if id(row) in places]

    @property
    def _chosen(self) -> Choices:
        assert self.choices is not None, "a step chooses its tokens before anybody asks for them"
        return self.choices

    def _take(self, tokens: list[int], logits: list[float], result: StepResult) -> Landed:
        logprobs = self._logprobs()
        landed = Landed(_not_finite(self.rows, logits))
        for row, token in zip(self.rows, tokens, strict=True):
            if row.gone:
                continue
            message = _spoilt(row) if id(row) in landed.doubtful else ""
            finish: EngineFinish | None = None
            if not message:
                finish, message = _taken(row, token)
            if not message:
                result.tokens.append(RowToken(row.id, token, logprobs.get((row.id, 0)), finish))
            if message or finish is not None:
                _end(row, message, landed, result)
        return landed

    def _take_window(self, tokens: list[list[int]], logits: list[list[float]], result: StepResult) -> Landed:
        """Hand each row its accepted draft tokens and the token after them; the rest of the block is rejected."""
        assert self.window is not None
        logprobs = self._logprobs()
        landed = Landed(_not_finite(self.rows, [first for first, *_ in logits]))
        for place, row in enumerate(self.rows):
            if row.gone:
                landed.accepted.append(0)
                continue
            accepted = self.window.accepted(place, tokens[place])
            taken, message = 0, ""
            finish: EngineFinish | None = None
            for token, logit in zip(tokens[place][: accepted + 1], logits[place], strict=False):
                finish, message = _taken(row, token) if math.isfinite(logit) else (None, _spoilt(row))
                if message:
                    break
                result.tokens.append(RowToken(row.id, token, logprobs.get((row.id, taken)), finish))
                taken += 1
                if finish is not None:
                    break
            row.held += taken
            row.sampled += taken
            row.window -= taken
            landed.accepted.append(accepted)
            draft = self.window.drafts[place]
            if draft is not None:
                result.drafts.append(RowDraft(row.id, draft.source, len(draft.tokens), min(accepted, taken)))
            if message or finish is not None:
                _end(row, message, landed, result)
        return landed

    def _logprobs(self) -> dict[tuple[int, int], TokenLogprobs]:
        """Log-probabilities by row id and the token's position in the step."""
        logprobs = self._chosen.logprobs
        if logprobs is None:
            return {}
        chosen: Any = logprobs.chosen.tolist()
        top: Any = [[] for _ in chosen]
        if logprobs.top_tokens is not None and logprobs.top_logprobs is not None:
            pairs = zip(logprobs.top_tokens.tolist(), logprobs.top_logprobs.tolist(), strict=True)  # type: ignore[arg-type]
            top = [list(zip(*cast(Any, best), strict=True)) for best in pairs]
        return dict(self._by_row(chosen, top))

    def _by_row(self, chosen: Any, top: Any) -> Iterator[tuple[tuple[int, int], TokenLogprobs]]:
        for start, row in zip(range(0, len(chosen), self.width), self.measured, strict=True):
            for ahead in range(self.width):
                place = start + ahead
                yield (row.id, ahead), TokenLogprobs(chosen[place], top[place][: row.logprobs])


def _taken(row: Row, token: int) -> tuple[EngineFinish | None, str]:
    """Give a row its next token; returns its finish reason, if it ends, and an error message, if its grammar fails."""
    try:
        return row.take(token), ""
    except Exception as error:  # noqa: BLE001 - a grammar that fails ends its own row
        return None, f"the constraint failed: {error}"


def _end(row: Row, message: str, landed: Landed, result: StepResult) -> None:
    row.gone = True
    if message:
        landed.failed.add(id(row))
        result.failures.append(RowFailure(row.id, message))
    else:
        landed.ended.append(row)


def _spoilt(row: Row) -> str:
    if row.matcher is not None and row.matcher.error:
        return f"the constraint failed: {row.matcher.error}"
    return "the model's output for this row is not a number"


def _not_finite(rows: Sequence[Row], chosen_logits: Sequence[float]) -> set[int]:
    """Rows, by `id()`, whose chosen logit is not finite."""
    if math.isfinite(sum(chosen_logits)):
        return set()
    return {id(row) for row, logit in zip(rows, chosen_logits, strict=True) if not math.isfinite(logit)}
