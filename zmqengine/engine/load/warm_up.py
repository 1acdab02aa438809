"""What ordinary traffic will need, done once before anybody waits for it.

On a GPU every kernel is compiled or loaded when it is first used, and every number of rows makes graphs of its own: the
first request of all would take seconds, and the first of each kind as long again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from zmqengine.engine.interface import Engine, RowRequest, Sampling
from zmqengine.engine.sampling.draw import SAMPLED
from zmqengine.engine.sampling.penalties import PENALISED

log = logging.getLogger("zmqengine.engine")

PLAIN = Sampling()
KINDS = (*SAMPLED, PENALISED)
_STEPS = 4
_ROWS_FOR_KINDS = 4
_LONG_TOKENS = 8192
_NUMBERS_MAX = 64
# Of the time, so much is for the most usual prompts, so much at most for every number of rows, and so much is left for
# long prompts after all others.
_USUAL_SHARE = 0.1
_NUMBERS_SHARE = 0.4
_LONG_SHARE = 0.1
# A measurement as short as this is repeated: the first is mostly what is done once.
_SHORT_S = 1.0


class Round(NamedTuple):
    """Rows that are read and make a few tokens together."""

    prompts: tuple[int, ...]
    sampling: Sampling = PLAIN
    logprobs: int | None = None
    in_turn: bool = False


_PLAIN_ROUND = Round(())


class Measured(NamedTuple):
    """What was seen: prompt tokens read in a second, and seconds of a step that reads none."""

    prompt_tokens_a_second: float
    step_s: float


def warm_up(
    engine: Engine,
    chunk: int,
    seconds_max: float,
    report: Callable[[float], None] = lambda fraction: None,
    begin: Callable[[Measured], None] = lambda measured: None,
    read_shapes: Callable[[float], object] | None = None,
) -> Measured | None:
    """Take rounds of rows through the engine for at most about `seconds_max`; nothing of them stays in it.

    `begin` is told what was measured, before each of the rounds that are read as prompts will be. Where each new shape
    costs, `read_shapes` reads prompts of every size, the most usual ones first, until a time on the clock of
    `time.perf_counter`; it is called twice, and every number of rows is met. None if time was up before the speed of
    reading could be seen. Raises what the engine raises.
    """
    began_s = time.perf_counter()
    until_s = began_s + seconds_max
    if read_shapes is not None:
        # The most usual ones first, whatever there is time for later.
        read_shapes(began_s + seconds_max * _USUAL_SHARE)
    context = engine.info.context_tokens - _STEPS - 2
    rounds = list(plan(engine.rows_max, chunk, context))
    numbers = [] if read_shapes is None else list(every_number(engine.rows_max, context))
    ids, done, every = count(-2, -1), count(1), len(rounds) + len(numbers)

    def take(some: Sequence[Round], some_until_s: float, prepare: Callable[[], None]) -> bool:
        for place, one in enumerate(some):
            if time.perf_counter() > some_until_s:
                log.info("warming up ended early", extra={"left": len(some) - place, "of": every})
                return False
            prepare()
            _run(engine, one, ids, some_until_s)
            report(next(done) / every)
        return True

    if not take(rounds, until_s, lambda: None):
        return None
    measured = _measure(engine, chunk, context, ids)
    numbers_until_s = min(until_s, time.perf_counter() + seconds_max * _NUMBERS_SHARE)
    # What is done once says nothing about the pace.
    take(numbers, numbers_until_s, lambda: begin(measured))
    if read_shapes is not None:
        read_shapes(until_s - seconds_max * _LONG_SHARE)
    begin(measured)
    _read_at_pace(engine, context, ids, seconds_max / 4)
    report(1.0)
    return measured


def _read_at_pace(engine: Engine, context: int, ids: Iterator[int], seconds_max: float) -> None:
    """Read a long prompt beside rows that decode, in chunks of the size that long prompts will have."""
    until_s = time.perf_counter() + seconds_max
    words = engine.info.vocab_size
    steps = max(1, min(1024, context - 20))
    others = [_request(next(ids), place, _within(20, context), steps, words) for place in range(2)]
    long = _request(next(ids), 3, _within(_LONG_TOKENS, context), _STEPS, words)
    rows = [long, *others][: engine.rows_max]
    try:
        engine.insert(rows)
        alive = {row.row for row in rows}
        while long.row in alive and time.perf_counter() <= until_s:
            result = engine.next()
            alive -= {token.row for token in result.tokens if token.finish is not None}
            alive -= {failure.row for failure in result.failures}
    finally:
        engine.remove([row.row for row in rows])


def plan(rows_max: int, chunk: int, context: int) -> Iterator[Round]:
    """The rounds, the most usual ones first."""
    yield Round((_within(24, context),))
    yield Round((_within(64, context),), SAMPLED[0])
    sizes = [rows for rows in (2, 4, 8, 16, 32, 64, 128, 256) if rows <= rows_max]
    for rows in sizes:
        # Of unlike lengths: they are padded, and leave gaps when they go.
        yield Round(tuple(_within(40 + place % 5, context) for place in range(rows)), in_turn=rows <= 8)
    for kind in KINDS:
        yield Round(
            tuple(_within(20 + place, context) for place in range(min(_ROWS_FOR_KINDS, rows_max))), kind
        )
    yield Round((_within(20, context),), PLAIN, logprobs=5)
    if sizes:
        yield Round((_within(30, context),) * sizes[-1], SAMPLED[0])
    for tokens in (256, chunk, 2 * chunk + 40):
        yield Round((_within(tokens, context),))


def every_number(rows_max: int, context: int) -> Iterator[Round]:
    """Rounds that meet what depends on the number of rows: it takes a GPU library other kernels, and CUDA new graphs.

    So many are read together, make tokens and end together; they join and end one by one; and few of them have longer
    prompts.
    """
    most = min(rows_max, _NUMBERS_MAX)
    for rows in range(2, most + 1):
        yield Round((_within(40, context),) * rows)
    yield Round((_within(40, context),) * most, in_turn=True)
    for tokens in (100, 200, 400):
        for rows in range(2, min(most, 8) + 1):
            yield Round((_within(tokens, context),) * rows)


def _within(tokens: int, context: int) -> int:
    return max(1, min(tokens, context))


def _run(engine: Engine, one: Round, ids: Iterator[int], until_s: float) -> None:
    started_s = time.perf_counter()
    tokens_max = _STEPS + (len(one.prompts) if one.in_turn else 0)
    rows = [
        _request(next(ids), place, tokens, tokens_max, engine.info.vocab_size, one)
        for place, tokens in enumerate(one.prompts)
    ]
    try:
        alive = {row.row for row in rows}
        waiting = [[row] for row in rows] if one.in_turn else [rows]
        # One step more: the last one is on its way when its token is told.
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
    row: int, place: int, tokens: int, tokens_max: int, words: int, one: Round = _PLAIN_ROUND
) -> RowRequest:
    return RowRequest(
        row=row,
        # Unlike those of all other rows and rounds, or they would be taken from the prompt cache.
        prompt=[1 + (row * 7919 + at * 31) % (words - 1) for at in range(tokens)],
        max_tokens=tokens_max,
        sampling=one.sampling,
        seed=place,
        logprobs=one.logprobs,
    )


def _measure(engine: Engine, chunk: int, context: int, ids: Iterator[int]) -> Measured:
    """As a prompt of a few chunks is read, and as one row makes tokens."""
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
