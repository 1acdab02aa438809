"""CPU time of the scheduler's calls with very many waiting requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from benchmarks.schedule.lines import Line
from zmqengine.bench.load.measures import Measures
from zmqengine.worker.requests.ticket import Ticket

CALLS_MAX = 20_000
NOW_S = 0.0


def measure_calls(line: Line, *, waiting: int, flows: int, seed: int) -> Measures:
    """Mean CPU microseconds of each call, with `waiting` requests of `flows` front-ends in the queue."""
    chance = random.Random(seed)
    tickets = [
        Ticket(f"flow {chance.randrange(flows)}", 1.0, chance.choice((-1, 0, 0, 1)), 300, None, number, NOW_S)
        for number in range(waiting)
    ]
    some = min(CALLS_MAX, max(1, waiting // 4))
    running: list[Ticket] = []

    def start(_: Ticket) -> None:
        first = line.first(NOW_S)
        assert first is not None, "many wait"
        line.start(first, NOW_S)
        running.append(first)

    measures = {
        "enqueue_us": _mean_us(lambda ticket: line.enqueue(ticket, NOW_S), tickets),
        "first_us": _mean_us(lambda _: line.first(NOW_S), tickets[:some]),
        "start_us": _mean_us(start, tickets[:some]),
        "charge_us": _mean_us(lambda ticket: line.charge(ticket, 0, 1), running),
        "park_us": _mean_us(lambda ticket: line.enqueue(ticket, NOW_S), running),
    }
    left = chance.sample(tickets, some)
    return measures | {"withdraw_us": _mean_us(line.withdraw, left)}


def _mean_us(call: Callable[[Ticket], object], tickets: Iterable[Ticket]) -> float:
    tickets = list(tickets)
    started_s = time.process_time()
    for ticket in tickets:
        call(ticket)
    return (time.process_time() - started_s) / len(tickets) * 1e6
