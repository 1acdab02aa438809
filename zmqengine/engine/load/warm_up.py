"""Warm-up of an engine before it is ready: a GPU compiles a kernel when it is first used."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from zmqengine.engine.interface import Engine, RowRequest, Sampling
from zmqengine.engine.kv.few_sizes import few_sizes
from zmqengine.engine.sampling.draw import SAMPLED
from zmqengine.engine.sampling.penalties import PENALISED

log = logging.getLogger("zmqengine.engine")

PLAIN = Sampling()
KINDS = (*SAMPLED, PENALISED)
# Decode steps of each round, and of each number of rows on its way down.
_STEPS, _STEPS_ON_THE_WAY = 4, 2
# Rows of the rounds: each passes all numbers of rows that a step is padded to, down to the one before.
_ROWS = (8, 32, 128, 256)
# Most tokens that a row of these makes.
_TOKENS_MAX = 18
# Rows of a round that tries a kind of sampling.
_ROWS_FOR_KINDS = 4
# A shorter measurement is repeated: one-time work dominates the first.
_SHORT_S = 1.0


class Round(NamedTuple):
    """Rows that prefill and decode a few tokens together.

    `in_turn`: they come one after the other. `on_the_way`: numbers of rows, below all of them, that decode a few tokens
    when the others have ended.
    """

    prompts: tuple[int, ...]
    sampling: Sampling = PLAIN
    logprobs: int | None = None
    in_turn: bool = False
    on_the_way: Sequence[int] = ()

    def tokens_of(self, row: int) -> int:
        """Tokens that a row makes."""
        later = sum(row < count for count in self.on_the_way)
        return _STEPS + (len(self.prompts) if self.in_turn else 0) + _STEPS_ON_THE_WAY * later


_PLAIN_ROUND = Round(())


class Measured(NamedTuple):
    """Measured speed: prompt tokens prefilled in a second, and seconds of a step without prefill."""

    prompt_tokens_a_second: float
    step_s: float


def warm_up(
    engine: Engine,
    chunk: int,
    seconds_max: float,
    report: Callable[[float], None] = lambda fraction: None,
) -> Measured | None:
    """Run rounds of rows through the engine for about `seconds_max` at most; the engine is as new afterwards.

    Returns the measured speed; None if time was up before. Raises what the engine raises.
    """
    until_s = time.perf_counter() + seconds_max
    context = engine.info.context_tokens - _TOKENS_MAX - 2
    rounds, ids = list(plan(engine.rows_max, chunk, context)), count(-2, -1)
    for done, one in enumerate(rounds):
        if time.perf_counter() > until_s:
            log.info("warming up ended early", extra={"left": len(rounds) - done, "of": len(rounds)})
            return None
        _run(engine, one, ids, until_s)
        report((done + 1) / (len(rounds) + 1))
    measured = _measure(engine, chunk, context, ids)
    report(1.0)
    return measured


def plan(rows_max: int, chunk: int, context: int) -> Iterator[Round]:
    """The rounds, the most common ones first."""
    yield Round((_within(24, context),))
    yield Round((_within(64, context),), SAMPLED[0])
    below = 1
    for rows in sorted({min(rows, rows_max) for rows in _ROWS} - {1}):
        # Rows of unlike lengths are padded, and leave gaps when they end.
        prompts = tuple(_within(40 + index % 5, context) for index in range(rows))
        between = sorted({few_sizes(count) for count in range(below + 1, rows)} - {rows})
        # Rows that came in turn end in turn.
        in_turn = rows <= _ROWS[0]
        yield Round(prompts, in_turn=in_turn, on_the_way=() if in_turn else between)
        below = rows
    for kind in KINDS:
        yield Round(
            tuple(_within(20 + index, context) for index in range(min(_ROWS_FOR_KINDS, rows_max))), kind
        )
    yield Round((_within(20, context),), PLAIN, logprobs=5)
    if rows_max > 1:
        yield Round((_within(30, context),) * min(rows_max, _ROWS[-1]), SAMPLED[0])
    for tokens in (256, chunk, 2 * chunk + 40):
        yield Round((_within(tokens, context),))


def _within(tokens: int, context: int) -> int:
    return max(1, min(tokens, context))


def _run(engine: Engine, one: Round, ids: Iterator[int], until_s: float) -> None:
    started_s = time.perf_counter()
    rows = [
        _request(next(ids), index, tokens, one.tokens_of(index), engine.info.vocab_size, one)
        for index, tokens in enumerate(one.prompts)
    ]
    try:
        alive = {row.row for row in rows}
        waiting = [[row] for row in rows] if one.in_turn else [rows]
        # One more step: another is in flight when the last token is reported.
        while alive and time.perf_counter() <= until_s:
            if waiting:
                for _, message, _ in engine.insert(waiting.pop(0)):
                    raise RuntimeError(f"a request of the warm-up was refused: {message}")
            result = engine.next()
            if result.failures:
                raise RuntimeError(f"a request of the warm-up failed: {result.failures[0].message}")
            alive -= {token.row for token in result.tokens if token.finish is not None}
    finally:
        engine.remove([row.row for row in rows])
    log.debug(
        "warmed up for %d rows of up to %d tokens in %.2f s",
        len(one.prompts), max(one.prompts), time.perf_counter() - started_s,
    )  # fmt: skip


def _request(
    row: int, index: int, tokens: int, tokens_max: int, words: int, one: Round = _PLAIN_ROUND
) -> RowRequest:
    return RowRequest(
        row=row,
        # Tokens unlike those of all other rows and rounds, or the prefix cache would provide them.
        prompt=[1 + (row * 7919 + at * 31) % (words - 1) for at in range(tokens)],
        max_tokens=tokens_max,
        sampling=one.sampling,
        seed=index,
        logprobs=one.logprobs,
    )


def _measure(engine: Engine, chunk: int, context: int, ids: Iterator[int]) -> Measured:
    """The speed of a prefill of a few chunks, and of the decode of one row."""
    started_s = time.perf_counter()
    first = _measure_once(engine, chunk, context, ids)
    if time.perf_counter() - started_s > _SHORT_S:
        return first
    second = _measure_once(engine, chunk, context, ids)
    return Measured(max(first[0], second[0]), min(first[1], second[1]))


def _measure_once(engine: Engine, chunk: int, context: int, ids: Iterator[int]) -> Measured:
    tokens = _within(2 * chunk + 1, context)
    row = _request(next(ids), 0, tokens, _STEPS + 2, engine.info.vocab_size)
    started_s = time.perf_counter()
    times: list[float] = []
    try:
        engine.insert([row])
        while len(times) < _STEPS + 1:
            result = engine.next()
            times += [time.perf_counter()] * len(result.tokens)
            if result.failures:
                raise RuntimeError(f"a request of the warm-up failed: {result.failures[0].message}")
    finally:
        engine.remove([row.row])
    steps = sorted(later - earlier for earlier, later in pairwise(times))
    step_s = steps[len(steps) // 2] if steps else 0.0
    return Measured(tokens / max(1e-6, times[0] - started_s - step_s), step_s)
