"""Variants of a computation, timed on this device: the fastest correct one is used."""

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
"""A computation of one array or several."""

Agree = Callable[[Any, Any], bool]

GAIN_MIN = 1.03
"""Least speed-up for which a variant replaces the first one."""

# Measurements of each variant, of which the fastest counts.
_REPEATS = 3
# Maximum seconds of one measurement.
_TRY_S = 0.05
# Factor to the fastest single call above which a variant is not measured further.
_FAR = 4.0
# Single calls before that, since the first one may still allocate.
_GATE_CALLS = 2
# Relative to the result's size. Half-precision weights round at 1 part in 256; a wrong kernel errs by more than 1.
_TOLERANCE = 0.03


class Timing(NamedTuple):
    """Microseconds of each variant, and the fastest."""

    best: str
    microseconds: dict[str, float]


def fastest(
    variants: Mapping[str, Variant], *, calls: int = 8, agree: Agree | None = None, gain_min: float = GAIN_MIN
) -> Timing:
    """The fastest of `variants`.

    The first is the reference: another one is used only if it is faster by the factor `gain_min` and its result agrees,
    by `agree` or else up to rounding. A variant that raises is left out, and a much slower one is not timed twice.
    Variants are timed in turns, so that a slow moment of the machine affects all of them.
    """
    agree = agree or same_but_for_rounding
    names = list(variants)
    wanted = variants[names[0]]()
    mx.eval(wanted)
    seconds: dict[str, float] = {}
    for name in names:
        try:
            if name != names[0] and not agree(variants[name](), wanted):
                log.warning(
                    "a kernel variant is rejected: its result differs from the reference",
                    extra={"variant": name},
                )
                continue
            mx.eval(variants[name]())
            seconds[name] = min(_time(variants[name], 1) for _ in range(_GATE_CALLS))
        except Exception as error:  # noqa: BLE001 - another variant is there
            log.debug(
                "a kernel variant fails on this device", extra={"variant": name, "reason": str(error)[:200]}
            )
    hopeless_s = min(_TRY_S, _FAR * min(seconds.values()))
    rates = {
        name: max(1, min(calls, int(_TRY_S / once_s)))
        for name, once_s in seconds.items()
        if once_s <= hopeless_s
    }
    if len(rates) > 1:
        # The time of a single call includes the launch.
        seconds |= dict.fromkeys(rates, math.inf)
        for _ in range(_REPEATS):
            seconds |= {name: min(seconds[name], _time(variants[name], many)) for name, many in rates.items()}
    best = min(seconds, key=lambda name: seconds[name] * (1.0 if name == names[0] else gain_min))
    return Timing(best, {name: round(second * 1e6, 1) for name, second in seconds.items()})


def _time(variant: Variant, calls: int) -> float:
    """Seconds of one of `calls` calls in a row."""
    mx.synchronize()
    started_s = time.perf_counter()
    mx.eval([variant() for _ in range(calls)])
    return (time.perf_counter() - started_s) / calls


def same_but_for_rounding(got: mx.array, wanted: mx.array, tolerance: float = _TOLERANCE) -> bool:
    """Whether two results differ by rounding of half precision at most, or by `tolerance` of their size."""
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    if got.shape != wanted.shape:
        return False
    difference = mx.sqrt(mx.square(got - wanted).sum())
    size = mx.sqrt(mx.square(wanted).sum())
    # Written so that NaN counts as a difference.
    return bool((difference <= tolerance * size + 1e-6).item())


def in_words(chosen: dict[str, str]) -> str:
    """A line for people: the variant of most shapes, by number of rows, which is the end of each name: `..., 8
    rows`."""
    votes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, variant in chosen.items():
        rows = int(name.rsplit(", ", 1)[1].split()[0])
        votes[rows][variant] += 1
    return ", ".join(
        f"{rows} rows: {max(names, key=names.__getitem__)}" for rows, names in sorted(votes.items())
    )
