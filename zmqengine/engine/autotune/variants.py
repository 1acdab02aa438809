"""Variants of a computation, timed on this device: the fastest one that is right is taken."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

log = logging.getLogger("zmqengine.engine")

Variant = Callable[[], Any]
"""Makes an array, or several."""

Agree = Callable[[Any, Any], bool]

GAIN_MIN = 1.03
"""A variant that is not faster by so much is not worth being another than the first."""

_REPEATS = 3
_TRY_S = 0.05
_FAR = 4.0
_GATE_CALLS = 2
# Of the size of the result. Weights of half precision round at 1 part in 256; a wrong kernel is off by more than all.
_TOLERANCE = 0.03


class Timing(NamedTuple):
    """Microseconds of each variant, and the one to take."""

    best: str
    microseconds: dict[str, float]


def fastest(
    variants: Mapping[str, Variant], *, calls: int = 8, agree: Agree | None = None, gain_min: float = GAIN_MIN
) -> Timing:
    """The fastest of `variants`.

    The first needs no proof: another one is taken only if it is faster by the factor `gain_min` and gives the same, as
    `agree` tells: but for rounding if it is not given. A variant that raises is left out, and one that is far behind
    is not timed twice. They are timed in turns: a slow moment of the machine is one of all of them.
    """
    agree = agree or same_but_for_rounding
    names = list(variants)
    wanted = variants[names[0]]()
    mx.eval(wanted)
    seconds: dict[str, float] = {}
    for name in names:
        try:
            if name != names[0] and not agree(variants[name](), wanted):
                log.warning("a kernel variant is wrong here and not taken", extra={"variant": name})
                continue
            mx.eval(variants[name]())
            seconds[name] = min(_time(variants[name], 1) for _ in range(_GATE_CALLS))
        except Exception as error:  # noqa: BLE001 - another variant is there
            log.info(
                "a kernel variant does not work here", extra={"variant": name, "reason": str(error)[:200]}
            )
    hopeless_s = min(_TRY_S, _FAR * min(seconds.values()))
    rates = {
        name: max(1, min(calls, int(_TRY_S / once_s)))
        for name, once_s in seconds.items()
        if once_s <= hopeless_s
    }
    if len(rates) > 1:
        # A single call waits for the host as well.
        seconds |= dict.fromkeys(rates, math.inf)
        for _ in range(_REPEATS):
            seconds |= {name: min(seconds[name], _time(variants[name], many)) for name, many in rates.items()}
    best = min(seconds, key=lambda name: seconds[name] * (1.0 if name == names[0] else gain_min))
    return Timing(best, {name: round(second * 1e6, 1) for name, second in seconds.items()})


def _time(variant: Variant, calls: int) -> float:
    """Seconds that a call takes among so many."""
    mx.synchronize()
    started_s = time.perf_counter()
    mx.eval([variant() for _ in range(calls)])
    return (time.perf_counter() - started_s) / calls


def same_but_for_rounding(got: mx.array, wanted: mx.array, tolerance: float = _TOLERANCE) -> bool:
    """Whether two results differ by no more than what half precision rounds, or so much of their size."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    if got.shape != wanted.shape:
        return False
    difference = mx.sqrt(mx.square(got - wanted).sum())
    size = mx.sqrt(mx.square(wanted).sum())
    # Not "<" negated: what is not a number is wrong.
    return bool((difference <= tolerance * size + 1e-6).item())


def in_words(chosen: dict[str, str]) -> str:
    """A line for people: the variant of most shapes, by the number of rows. Names end with it: `..., 8 rows`."""
    votes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, variant in chosen.items():
        rows = int(name.rsplit(", ", 1)[1].split()[0])
        votes[rows][variant] += 1
    return ", ".join(
        f"{rows} rows: {max(names, key=names.__getitem__)}" for rows, names in sorted(votes.items())
    )
