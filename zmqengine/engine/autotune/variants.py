"""Several ways to compute the same: they are timed on this device, and the fastest that is right is taken."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

log = logging.getLogger("zmqengine.engine")

Way = Callable[[], Any]
"""Makes an array, or several."""

Product = Callable[[mx.array, Any], mx.array]
Agree = Callable[[Any, Any], bool]

# A way that is not faster by so much is not worth being another than the first.
_GAIN_MIN = 1.03
_REPEATS = 3
_TRY_S = 0.05
_FAR = 4.0
_GATE_CALLS = 2
# Of the size of the result. Weights of half precision round at 1 part in 256; a wrong kernel is off by more than all.
_TOLERANCE = 0.03


class Timing(NamedTuple):
    """What each way takes in microseconds, and the one to take."""

    best: str
    microseconds: dict[str, float]


class WayTable:
    """Which of `ways` a layer of one shape takes, by the number of rows: that of the next larger one in `names`."""

    def __init__(self, names: Mapping[int, str], ways: Mapping[str, Product]) -> None:
        self.names = dict(names)
        self._ways = [(rows, ways[name]) for rows, name in sorted(names.items())]

    def multiply(self, inputs: mx.array, layer: Any) -> mx.array:
        """The product of `inputs` [..., inputs] and the weights of `layer`."""
        return self.way(inputs.size // inputs.shape[-1])(inputs, layer)

    def way(self, rows: int) -> Product:
        """The one for so many rows."""
        return next((way for measured, way in self._ways if rows <= measured), self._ways[-1][1])


def fastest(ways: Mapping[str, Way], *, calls: int = 8, agree: Agree | None = None) -> Timing:
    """The fastest of `ways`.

    The first is the one that needs no proof: another one is taken only if it is faster and gives the same, as `agree`
    says: but for rounding if it is not given. A way that raises is left out, and one that is far behind is not timed
    twice. They are timed in turns: a slow moment of the machine is one of all of them.
    """
    agree = agree or same_but_for_rounding
    names = list(ways)
    wanted = ways[names[0]]()
    mx.eval(wanted)
    seconds: dict[str, float] = {}
    for name in names:
        try:
            if name != names[0] and not agree(ways[name](), wanted):
                log.warning("a way to compute is wrong here and not taken", extra={"way": name})
                continue
            mx.eval(ways[name]())
            seconds[name] = min(_time(ways[name], 1) for _ in range(_GATE_CALLS))
        except Exception as error:  # noqa: BLE001 - another way is there
            log.info("a way to compute does not work here", extra={"way": name, "reason": str(error)[:200]})
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
            seconds |= {name: min(seconds[name], _time(ways[name], many)) for name, many in rates.items()}
    best = min(seconds, key=seconds.__getitem__)
    if seconds[names[0]] <= seconds[best] * _GAIN_MIN:
        best = names[0]
    return Timing(best, {name: round(second * 1e6, 1) for name, second in seconds.items()})


def _time(way: Way, calls: int) -> float:
    """Seconds that a call takes among so many."""
    mx.synchronize()
    started_s = time.perf_counter()
    mx.eval([way() for _ in range(calls)])
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


def in_turn(values: Sequence[object]) -> Callable[[], int]:
    """The places of `values`, one after the other for ever."""
    place = -1

    def following() -> int:
        nonlocal place
        place = (place + 1) % len(values)
        return place

    return following


def in_words(chosen: dict[str, str]) -> str:
    """A line for people: what most shapes take, by the number of rows. Names end with it: `..., 8 rows`."""
    votes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, way in chosen.items():
        rows = int(name.rsplit(", ", 1)[1].split()[0])
        votes[rows][way] += 1
    return ", ".join(
        f"{rows} rows: {max(ways, key=ways.__getitem__)}" for rows, ways in sorted(votes.items())
    )
