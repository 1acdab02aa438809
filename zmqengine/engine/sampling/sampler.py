"""How tokens are chosen from logits, for all rows of a batch in a few calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from zmqengine.engine.cuda import drawing
from zmqengine.engine.cuda.drawing import Drawn
from zmqengine.engine.row import Row
from zmqengine.engine.seeds import uniform
from zmqengine.sampling_params import Sampling

# Halvings of the search for the top_p threshold: enough for 1 part in 10,000.
_NUCLEUS_STEPS = 18
# Long before a temperature is this small, sampling is greedy; its inverse would not fit a float32.
_INVERSE_MAX = 1e30

SAMPLED = (
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02),
)
"""Usual sampling parameters, to be compiled before a request asks for them."""

DrawMethod = Literal["search", "sort", "kernel"]
"""How top_p is found: by halving an interval, by sorting, or all of the choice by a kernel for CUDA."""

_method: DrawMethod = "search"


def use_method(method: DrawMethod) -> None:
    """Make plans for this method from now on. Which one is fast depends on the device and the vocabulary; all draw from
    the same distribution, but for tokens whose weight is within 1 part in 10,000 of the threshold's."""
    global _method  # noqa: PLW0603 - one device and one model a process
    _method = method


@dataclass(frozen=True)
class DrawPlan:
    """The parameters of the rows that sample, as columns of shape [rows, 1]; None where no row uses one."""

    rows: list[Row]
    index: mx.array | None
    inverse_temperature: mx.array
    top_k: mx.array | None
    top_k_max: int
    top_p: mx.array | None
    every_top_p_has_top_k: bool
    min_p_floor: mx.array | None
    method: DrawMethod

    def uniforms(self, width: int = 1, ahead: int = 0) -> mx.array:
        """Uniform numbers in [0, 1), [rows * width, 1], by seed and output index; the first is `ahead` tokens on."""
        places = range(ahead, ahead + width)
        return mx.array([uniform(row.key, row.sampled + place) for row in self.rows for place in places])[
            :, None
        ]

    def widened(self, width: int) -> DrawPlan:
        """The plan for `width` tokens of each row, one after the other: every column, each entry that many times."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        columns: dict[str, Any] = {
            name: mx.repeat(value, width, axis=0)
            for name, value in values.items()
            if isinstance(value, mx.array) and value.ndim == 2
        }
        return replace(self, **columns)


class KernelPlan:
    """The parameters of all rows of a batch, where a kernel for CUDA finds them."""

    def __init__(self, rows: Sequence[Row], vocab_size: int) -> None:
        self._rows = list(rows)
        self._vocab_size = vocab_size
        self._first: list[int] = []
        self._columns: mx.array | None = None

    def choose(self, logits: mx.array, width: int, ahead: int) -> Chosen:
        """As `choose`."""
        counts = {row.sampled - first for row, first in zip(self._rows, self._first, strict=False)}
        if self._columns is None or len(counts) != 1:
            # Rows gained unequal numbers of tokens since the columns were made: the kernel adds one number for all.
            self._first = [row.sampled for row in self._rows]
            self._columns = drawing.columns([self._drawn(row) for row in self._rows])
            counts = {0}
        found = drawing.choose(logits, self._columns, counts.pop() + ahead, width)
        return Chosen(found.tokens, None, found.told)

    def _drawn(self, row: Row) -> Drawn:
        setting = row.sampling
        return Drawn(
            row.key,
            row.sampled,
            min(1 / setting.temperature, _INVERSE_MAX) if setting.temperature > 0 else 0.0,
            _top_k(setting, self._vocab_size),
            setting.top_p,
            math.log(setting.min_p) if setting.min_p > 0 else -math.inf,
        )


Plan = DrawPlan | KernelPlan | None


class Chosen(NamedTuple):
    """Tokens for the device to go on with; and for the host either their logits, or what tells it of both."""

    tokens: mx.array
    logits: mx.array | None
    told: tuple[mx.array, ...]


class LogprobArrays(NamedTuple):
    """Log-probabilities of some rows of a batch, still on the device."""

    chosen: mx.array
    top_tokens: mx.array | None
    top_logprobs: mx.array | None


def plan_draw(rows: Sequence[Row], vocab_size: int) -> Plan:
    """The plan for the rows that sample, None when all of `rows` are greedy; for the kernel that of all rows."""
    if _method == "kernel":
        return KernelPlan(rows, vocab_size)
    places = [place for place, row in enumerate(rows) if row.sampling.temperature > 0]
    if not places:
        return None
    drawn = [rows[place] for place in places]
    settings = [row.sampling for row in drawn]
    top_ks = [_top_k(setting, vocab_size) for setting in settings]
    return DrawPlan(
        rows=drawn,
        index=None if len(drawn) == len(rows) else mx.array(places),
        inverse_temperature=_column([min(1 / setting.temperature, _INVERSE_MAX) for setting in settings]),
        top_k=mx.array(top_ks)[:, None] if min(top_ks) < vocab_size else None,
        top_k_max=max((k for k in top_ks if k < vocab_size), default=0),
        top_p=_column([s.top_p for s in settings]) if any(s.top_p < 1 for s in settings) else None,
        every_top_p_has_top_k=all(
            k < vocab_size for s, k in zip(settings, top_ks, strict=True) if s.top_p < 1
        ),
        min_p_floor=_column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in settings])
        if any(s.min_p > 0 for s in settings)
        else None,
        method=_method,
    )


def choose(logits: mx.array, plan: Plan, width: int = 1, ahead: int = 0) -> Chosen:
    """The next token for each of `logits` [rows * width, vocab], `width` one after the other for each row: the
    likeliest, or drawn as the plan says. `ahead`: tokens each row will have gained before this step."""
    if isinstance(plan, KernelPlan):
        return plan.choose(logits, width, ahead)
    tokens = _choose(logits, plan, width, ahead)
    return Chosen(tokens, mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0], ())


def _choose(logits: mx.array, plan: DrawPlan | None, width: int, ahead: int) -> mx.array:
    if plan is None:
        return mx.argmax(logits, axis=-1)
    uniforms = plan.uniforms(width, ahead)
    wide = plan if width == 1 else plan.widened(width)
    if plan.index is None:
        return draw(logits, wide, uniforms)
    index = widened_places(plan.index, width)
    tokens = mx.argmax(logits, axis=-1)
    tokens[index] = draw(logits[index], wide, uniforms)
    return tokens


def widened_places(places: mx.array, width: int) -> mx.array:
    """Indices of the rows at `places` in logits flattened to [rows * width]."""
    return places if width == 1 else (places[:, None] * width + mx.arange(width)).reshape(-1)


def draw(logits: mx.array, plan: DrawPlan, uniforms: mx.array) -> mx.array:
    """Tokens [rows] drawn from `logits` [rows, vocab] by inverting the cumulative distribution at `uniforms`.

    One random number a row is enough, and it does not depend on the shape of the batch.
    """
    logits = logits.astype(mx.float32)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) * plan.inverse_temperature
    weights = mx.exp(scaled)
    if plan.top_k is not None:
        best = mx.sort(mx.topk(scaled, plan.top_k_max, axis=-1), axis=-1)
        weights = weights * (scaled >= _top_k_floor(best, plan))
    if plan.top_p is not None:
        if plan.top_k is not None and plan.every_top_p_has_top_k:
            floor = _nucleus_floor_of_best(best, plan)
        elif plan.method == "sort":
            floor = _nucleus_floor_sorted(scaled, weights, plan.top_p)
        else:
            floor = _nucleus_floor(scaled, weights, plan.top_p)
        weights = weights * (scaled >= floor)
    if plan.min_p_floor is not None:
        weights = weights * (scaled >= plan.min_p_floor)
    cumulative = mx.cumsum(weights, axis=-1)
    # A token of weight 0 is never taken, even where rounding makes the sum creep.
    taken = (cumulative > uniforms * cumulative[:, -1:]) & (weights > 0)
    return mx.argmax(taken, axis=-1)


def measure(logits: mx.array, tokens: mx.array, top: int) -> LogprobArrays:
    """Log-probabilities of `tokens` [rows] in `logits` [rows, vocab], and of the `top` likeliest, best first."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if not top:
        return LogprobArrays(chosen[:, 0], None, None)
    top = min(top, logits.shape[-1])
    best = mx.argpartition(-logits, top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logits, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return LogprobArrays(
        chosen[:, 0],
        mx.take_along_axis(best, order, axis=-1),
        mx.take_along_axis(values, order, axis=-1) - total,
    )


def _top_k_floor(best: mx.array, plan: DrawPlan) -> mx.array:
    """The scaled logit [rows, 1] of the last token that top_k leaves; `best` are the top_k_max best, ascending."""
    assert plan.top_k is not None
    place = mx.maximum(plan.top_k_max - plan.top_k, 0)
    return mx.where(_limited(plan), mx.take_along_axis(best, place, axis=-1), -mx.inf)


def _nucleus_floor_of_best(best: mx.array, plan: DrawPlan) -> mx.array:
    """The scaled logit [rows, 1] of the last token that top_p leaves, in rows that top_k has cut to some of `best`."""
    assert plan.top_k is not None
    assert plan.top_p is not None
    ranked = best[:, ::-1]
    weights = mx.exp(ranked) * (mx.arange(plan.top_k_max) < plan.top_k)
    before = mx.cumsum(weights, axis=-1) - weights
    wanted = weights.sum(axis=-1, keepdims=True) * plan.top_p
    last = mx.maximum(((before < wanted) & (weights > 0)).sum(axis=-1, keepdims=True) - 1, 0)
    return mx.where(plan.top_p < 1, mx.take_along_axis(ranked, last, axis=-1), -mx.inf)


def _nucleus_floor(scaled: mx.array, weights: mx.array, top_p: mx.array) -> mx.array:
    """The scaled logit [rows, 1] at and above which tokens are the smallest set with `top_p` of all weight.

    It halves an interval instead of sorting: more than twice as fast for 32,000 words on a CPU, and exact but for
    tokens whose weight is within 1 part in 10,000 of the threshold's.
    """
    total = weights.sum(axis=-1, keepdims=True)
    wanted = total * top_p
    # All tokens below this together weigh less than what may be left out. A row with top_p 1 keeps everything.
    low = mx.log(total * mx.maximum(1 - top_p, 0) / scaled.shape[-1])
    high = mx.full(low.shape, 1e-6)
    for _ in range(_NUCLEUS_STEPS):
        middle = (low + high) / 2
        enough = (weights * (scaled >= middle)).sum(axis=-1, keepdims=True) >= wanted
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return mx.minimum(low, 0)


def _nucleus_floor_sorted(scaled: mx.array, weights: mx.array, top_p: mx.array) -> mx.array:
    """`_nucleus_floor` by sorting, which a GPU does in two or three calls."""
    # What top_k has cut weighs nothing, and must come before all that weighs something.
    ranked = mx.sort(mx.where(weights > 0, scaled, -mx.inf), axis=-1)
    up_to = mx.cumsum(mx.exp(ranked), axis=-1)
    total = up_to[:, -1:]
    # A token stays while all that weigh more than it are not yet enough.
    out = (up_to <= total * (1 - top_p)).sum(axis=-1, keepdims=True)
    floor = mx.take_along_axis(ranked, mx.minimum(out, scaled.shape[-1] - 1), axis=-1)
    return mx.where(top_p < 1, floor, -mx.inf)


def _limited(plan: DrawPlan) -> mx.array:
    """Which rows [rows, 1] use top_k."""
    assert plan.top_k is not None
    return plan.top_k <= plan.top_k_max


def _top_k(sampling: Sampling, vocab_size: int) -> int:
    return sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
