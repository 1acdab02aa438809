"""The draft model: a smaller model with the same vocabulary, stepped for all rows at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from zmqengine.engine.interface import RowRequest
from zmqengine.engine.models.decoder import Queries
from zmqengine.engine.models.model_runner import RowPiece
from zmqengine.engine.models.slot_runner import SlotRunner
from zmqengine.engine.row import Row
from zmqengine.engine.sampling.draw import PLAIN_DRAW, Draw, DrawPlan
from zmqengine.engine.speculation.costs import measured_rows
from zmqengine.engine.speculation.importance import LOOK_AHEAD, importance, kept_tokens
from zmqengine.engine.speculation.source import WARM_UP_PROMPT, WIDTHS, ModelSource, TokenTimes

DRAFT_TOKENS_MAX = 8
"""Columns of its KV cache beyond a row: the widest verify block."""
# Maximum tokens of prompts that the draft model computes before one verify block, which waits for them.
_PROMPT_TOKENS_MAX = 512
# Tokens of a prompt read at once to choose some of them: always the same slices, so that a choice does not depend on
# what else runs. As many as a prefill chunk has on any machine (step/pacing.py, TOKENS_START).
_SLICE_TOKENS = 256


class DraftModel(ModelSource):
    """Drafts of a smaller model with the target's vocabulary, stepped for all its rows at once.

    A row samples its draft tokens with the random numbers of its own tokens, so that they agree more often. The draft
    model has a slot for each row, which holds the row's tokens as far as they are computed, and then draft tokens.
    """

    name = "draft"
    prior = 0.6
    widths = WIDTHS

    def __init__(
        self, runner: SlotRunner, parameter_bytes: int, *, words: int, draw: Draw = PLAIN_DRAW
    ) -> None:
        self.parameter_bytes = parameter_bytes
        self.times = TokenTimes()
        # Both models may have logits for more tokens than their tokenizer, and unlike numbers of them.
        self._words = words
        self._runner = runner
        self._draw = draw
        # The row of the draft model for each row of the target, with its tokens: computed ones, then draft tokens.
        self._shadows: dict[Row, Row] = {}
        self._plan: tuple[list[Row], DrawPlan] | None = None

    @property
    def byte_count(self) -> int:
        """Bytes of the draft model's KV caches."""
        return self._runner.byte_count

    def trim(self, empty_bytes_max: int, ahead_bytes: int) -> int:
        """See `ModelRunner.trim`."""
        return self._runner.trim(empty_bytes_max, ahead_bytes, ())

    def project_bytes(self, tokens: int) -> int:
        """Maximum bytes of its cache for a row of `tokens`."""
        return self._runner.project_bytes(tokens + DRAFT_TOKENS_MAX)

    def prepare(self, rows_max: int) -> None:
        """See `ModelSource`."""
        for count in measured_rows(rows_max):
            rows = [Row(RowRequest(row, WARM_UP_PROMPT, 99), self._words, 128) for row in range(count)]
            for _ in range(2):
                self.times.begin(count)
                self.draft(rows, [DRAFT_TOKENS_MAX - 1] * count)
            self.clear()

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Sequence[int]]:
        """A draft for each row whose prompt is computed; computes some tokens of the other prompts."""
        self.release()
        for row in rows:
            self._follow(row)
        ready = [row for row in rows if self._is_ready(row)]
        waiting = [row for row in rows if row not in ready]
        if waiting:
            self._compute_prompts(waiting)
        count = max((most for row, most in zip(rows, counts, strict=True) if row in ready), default=0)
        if not count:
            return [[] for _ in rows]
        started_s = time.perf_counter()
        drafts = self._drafts(ready, count)
        self.times.add(len(ready), (time.perf_counter() - started_s) / count)
        return [drafts[row][:most] if row in drafts else [] for row, most in zip(rows, counts, strict=True)]

    def choose(self, row: Row, seconds_max: float, clock: Callable[[], float]) -> np.ndarray | None:
        """Read slices of a row's prompt for about `seconds_max` of `clock`, one at least; 0 is for no limit.

        Returns the indices of the tokens to keep once it is read.
        """
        shadow = self._shadows.get(row) or self._shadow(row, row.prompt)
        end_s = clock() + seconds_max
        last = len(shadow.tokens) - 1
        while shadow.computed_tokens < last:
            before_s = clock()
            start = shadow.computed_tokens
            stop = min(start + _SLICE_TOKENS, last)
            unread = mx.array(shadow.tokens[start:stop], mx.uint32)
            mx.eval(self._runner.forward([RowPiece(shadow, start, stop - start)], unread, 1).marker)
            shadow.computed_tokens = stop
            now_s = clock()
            if seconds_max and 2 * now_s - before_s > end_s:
                return None
        scores = importance(self._runner, shadow.cache, last + 1, self._look_ahead(shadow))
        shadow.computed_tokens = last + 1
        if self._runner.ends_apart:
            # Its states have passed tokens that may not come.
            self._shadows.pop(row).cache.close(is_finite=False)
        assert row.keep is not None, "a share of the prompt is wanted"
        return kept_tokens(scores, row.keep)

    def release(self) -> None:
        """Free the caches of rows that are gone."""
        for row in [row for row in self._shadows if row.gone]:
            self._shadows.pop(row).cache.close(is_finite=False)

    def clear(self) -> None:
        """Free all caches."""
        self._shadows.clear()
        self._runner.clear()
        self._plan = None

    def _follow(self, row: Row) -> None:
        """Count as computed what the row has in common with its shadow, draft tokens that were accepted included."""
        tokens = self._read([*row.prompt, *row.tokens[row.prompt_tokens :]])
        shadow = self._shadows.get(row) or self._shadow(row, tokens)
        known = shadow.tokens[: shadow.computed_tokens]
        same = next(
            (at for at, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1]), None
        )
        # The last token is read again: its logits are wanted.
        shadow.computed_tokens = min(len(tokens) - 1, len(known) if same is None else same)
        shadow.tokens = tokens

    def _shadow(self, row: Row, tokens: Sequence[int]) -> Row:
        shadow = self._shadows[row] = Row(RowRequest(row.id, self._read(tokens)), self._words, 1 << 60)
        shadow.cache = self._runner.open(len(tokens) + DRAFT_TOKENS_MAX)
        return shadow

    def _read(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as the draft model reads them."""
        return [min(token, self._words - 1) for token in tokens]

    def _look_ahead(self, shadow: Row) -> list[Queries]:
        """Queries of the last token of a prompt, and of tokens that the draft model adds."""
        token, looks = mx.array(shadow.tokens[-1:], mx.uint32), []
        for ahead in range(LOOK_AHEAD):
            piece = RowPiece(shadow, shadow.computed_tokens + ahead, 1, samples=1)
            queries: Queries = {}
            logits = self._runner.forward([piece], token, 1, queries=queries).logits
            assert logits is not None
            token = mx.argmax(logits[:, 0, : self._words], axis=-1).astype(mx.uint32)
            # Before the next write: see `engine/kv`.
            mx.eval(token, queries)
            looks.append(queries)
        return looks

    def _is_ready(self, row: Row) -> bool:
        shadow = self._shadows[row]
        return len(shadow.tokens) - shadow.computed_tokens <= _PROMPT_TOKENS_MAX

    def _compute_prompts(self, rows: Sequence[Row]) -> None:
        """Compute some tokens of the prompts of `rows`, the shortest first."""
        left = _PROMPT_TOKENS_MAX
        pieces, tokens = [], []
        for row in sorted(rows, key=lambda row: len(row.tokens)):
            shadow = self._shadows[row]
            start = shadow.computed_tokens
            count = min(left, len(shadow.tokens) - 1 - start)
            if count > 0:
                pieces.append(RowPiece(shadow, start, count))
                tokens += shadow.tokens[start : start + count]
                shadow.computed_tokens += count
                left -= count
        if pieces:
            # Evaluated here, so that its time counts as time of drafting.
            mx.eval(self._runner.forward(pieces, mx.array(tokens, mx.uint32), 1).marker)

    def _drafts(self, rows: Sequence[Row], count: int) -> dict[Row, list[int]]:
        """`count` draft tokens of each of `rows`."""
        shadows = [self._shadows[row] for row in rows]
        pieces = [
            RowPiece(shadow, shadow.computed_tokens, len(shadow.tokens) - shadow.computed_tokens, samples=1)
            for shadow in shadows
        ]
        unread = [token for piece in pieces for token in piece.row.tokens[piece.start :]]
        if self._plan is None or self._plan[0] != list(rows):
            self._plan = list(rows), self._draw.plan(rows, self._words)
        plan = self._plan[1]
        tokens = mx.array(unread, mx.uint32)
        steps = []
        for ahead in range(count):
            logits = self._runner.forward(pieces, tokens, 1).logits
            assert logits is not None
            tokens = plan.draw(logits[:, 0, : self._words], ahead=ahead)[0].astype(mx.uint32)
            steps.append(tokens)
            pieces = [RowPiece(shadow, len(shadow.tokens) + ahead, 1, samples=1) for shadow in shadows]
            if self._runner.launches_ahead:
                # Kernels write in place: a step is started before the next one is built.
                mx.async_eval(tokens)  # type: ignore[no-untyped-call]
        drafted: list[list[int]] = mx.stack(steps, axis=1).tolist()  # type: ignore[assignment]
        for shadow, made in zip(shadows, drafted, strict=True):
            # The last draft token was not read.
            shadow.computed_tokens = len(shadow.tokens) + count - 1
            shadow.tokens = shadow.tokens + made
        return dict(zip(rows, drafted, strict=True))
