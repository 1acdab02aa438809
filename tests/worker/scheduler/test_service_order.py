"""Who is served next, and who makes room."""

from __future__ import annotations

import gc
import random
from collections import Counter
from itertools import count

import pytest

from tests.worker.scheduler.plain_order import PlainOrder
from tests.worker.scheduler.serving import Serving
from zmqengine.worker.requests.ticket import PriorityClass, Ticket
from zmqengine.worker.scheduler.policy import STARTS_PER_TURN, ServiceOrder

ARRIVALS = count()


def ticket(
    flow: str = "a", *, priority: int = 0, weight: float = 1.0, prompt: int = 10, max_tokens: int = 10
) -> Ticket:
    return Ticket(flow, weight, priority, prompt, max_tokens, next(ARRIVALS), 0.0)


def enqueued(order: ServiceOrder, *tickets: Ticket, now_s: float = 0.0) -> None:
    for one in tickets:
        order.enqueue(one, now_s)


def started(order: ServiceOrder, now_s: float = 0.0) -> Ticket:
    """The first, now running."""
    first = order.first(now_s)
    assert first is not None
    order.start(first, now_s)
    return first


def test_classes_go_in_order_and_a_flow_goes_by_number_and_arrival() -> None:
    """The number orders inside a flow; between classes its sign does."""
    order = ServiceOrder()
    batch, late, early, number, urgent = (ticket(priority=p) for p in (5, 0, 0, -3, -9))
    enqueued(order, batch, early, late, number, urgent)
    assert [started(order) for _ in range(5)] == [urgent, number, late, early, batch]
    assert order.first(0.0) is None
    assert len(order) == 0


def test_a_number_never_beats_another_flow_of_its_class() -> None:
    """-100 of one that was served more waits for -1 of one that was served less."""
    order = ServiceOrder()
    greedy, next_greedy = ticket("a", priority=-100), ticket("a", priority=-100)
    modest = ticket("b", priority=-1)
    enqueued(order, greedy, next_greedy, modest)
    assert started(order) is greedy
    assert started(order) is modest


def test_a_parked_request_goes_before_the_newer_ones_of_its_flow() -> None:
    """It keeps its arrival."""
    order = ServiceOrder()
    old, new = ticket(), ticket()
    enqueued(order, old, new)
    assert started(order) is old
    order.enqueue(old, 1.0)
    assert started(order, 1.0) is old


@pytest.mark.parametrize("rows", [4, 32])
def test_saturating_flows_of_unlike_prompts_share_the_cost_alike(rows: int) -> None:
    """Jain's index over what each was served is 0.99 or more, though one reads 64 times as much a request."""
    serving = Serving(rows=rows)
    for number in range(8):
        serving.saturate(f"flow {number}", prompt=16 << (number % 7), output=32)
    serving.run(passes=20_000 // rows)
    assert serving.jain() >= 0.99


def test_weights_divide_the_service() -> None:
    """1 : 2 : 4, by cost."""
    serving = Serving(rows=8)
    for weight in (1, 2, 4):
        serving.saturate(f"weight {weight}", weight=weight, prompt=50, output=20)
    serving.run(passes=8_000)
    least = serving.cost["weight 1"]
    assert serving.cost["weight 2"] / least == pytest.approx(2, rel=0.05)
    assert serving.cost["weight 4"] / least == pytest.approx(4, rel=0.05)


def test_one_that_sends_little_is_next_after_at_most_one_start() -> None:
    """A has 200 requests waiting; each of B's starts with the first or second row that comes free."""
    serving = Serving(rows=8)
    for _ in range(200):
        serving.insert("a", prompt=16, output=256)
    waits = []
    for number in range(3_000):
        if number % 300 == 0:
            serving.insert("b", prompt=16, output=16)
        waits += [starts for flow, starts in serving.run_pass() if flow == "b"]
    assert len(waits) == 10
    assert max(waits) <= 1


def test_being_idle_earns_nothing() -> None:
    """After a long time alone of A, B gets its half from now on and not more."""
    serving = Serving(rows=4)
    serving.saturate("a", prompt=16, output=16)
    serving.run(passes=5_000)
    before = serving.cost["a"]
    serving.saturate("b", prompt=16, output=16)
    serving.run(passes=2_000)
    assert serving.cost["b"] / (serving.cost["a"] - before) == pytest.approx(1, abs=0.05)


def test_being_idle_while_others_run_and_nobody_waits_earns_nothing() -> None:
    """Service that kept nobody waiting is not held against those who had it."""
    order = ServiceOrder()
    alone = ticket("a")
    enqueued(order, alone)
    started(order)
    order.charge(alone, 10, 100_000)
    enqueued(order, *(ticket("b") for _ in range(20)), *(ticket("a") for _ in range(20)))
    flows = [started(order).flow for _ in range(10)]
    assert 4 <= flows.count("a") <= 6


def test_leaving_and_coming_back_clears_no_debt() -> None:
    """A flow that was served ahead of those that wait is remembered until they have caught up."""
    order = ServiceOrder()
    long, others = ticket("a"), [ticket("b") for _ in range(8)]
    enqueued(order, long, *others)
    assert started(order) is long
    order.charge(long, 10, 25)
    order.withdraw(long)
    again = ticket("a")
    enqueued(order, again)
    flows = [started(order).flow for _ in range(8)]
    assert flows == ["b"] * 6 + ["a", "b"]


def test_worse_classes_get_a_turn_under_endless_better_work() -> None:
    """Once `ageing_s` has passed, at the latest with the 20th start, and not before."""
    order = ServiceOrder(ageing_s=10.0)
    batch, normal = ticket("b", priority=1), ticket("n")
    enqueued(order, batch, normal)
    starts = []
    for number in range(40):
        enqueued(order, ticket("i", priority=-1), ticket("i", priority=-1), now_s=float(number))
        starts.append(started(order, float(number)))
    assert sorted([starts.index(normal), starts.index(batch)]) == [STARTS_PER_TURN - 1, STARTS_PER_TURN]
    assert order.aged_starts == 2


def test_one_flow_cannot_keep_its_class_from_ageing() -> None:
    """By putting a fresh request before its own whenever they come of age."""
    order = ServiceOrder(ageing_s=10.0)
    trick, victim = ticket("trick", priority=100), ticket("honest", priority=1)
    enqueued(order, trick, victim)
    for second in range(100):
        if second % 9 == 0:
            enqueued(order, ticket("trick", priority=99 - second // 9), now_s=float(second))
        enqueued(order, ticket("i", priority=-1), ticket("i", priority=-1), now_s=float(second))
        started(order, float(second))
    assert victim.phase == "running"


def test_endless_worse_work_gets_its_part_of_the_starts_and_no_more() -> None:
    """So a deep queue of batch work does not become as urgent as everything else by waiting."""
    order = ServiceOrder(ageing_s=0.0)
    enqueued(order, *(ticket("b", priority=1) for _ in range(500)))
    enqueued(order, *(ticket("i", priority=-1) for _ in range(800)))
    kinds = Counter(started(order, 1000.0).priority_class for _ in range(800))
    assert kinds[PriorityClass.BATCH] == 800 // STARTS_PER_TURN


def test_for_memory_the_worst_class_is_parked_and_then_the_youngest() -> None:
    """So the oldest of the best class is never parked while there is another."""
    order = ServiceOrder()
    rows = [ticket(priority=p) for p in (-1, 0, 1, 1, 0, -1)]
    for row in rows:
        enqueued(order, row)
        order.start(row, 0.0)
    parked = []
    while (row := order.victim(rows)) is not None:  # type: ignore[assignment]
        rows.remove(row)
        parked.append(row.priority)
    assert parked == [1, 1, 0, 0, -1, -1]
    assert order.victim([]) is None


def test_only_batch_rows_are_displaced_and_only_by_better_ones() -> None:
    """The youngest batch row first; a normal row never, and nobody by its own class."""
    order = ServiceOrder()
    rows = [ticket(f"other {p}", priority=p) for p in (-1, 0, 3, 4)]
    for row in rows:
        enqueued(order, row)
        order.start(row, 0.0)
    for priority, displaced in ((-1, rows[3]), (0, rows[3]), (1, None)):
        waiting = ticket("new", priority=priority)
        enqueued(order, waiting)
        assert order.victim(rows, for_=waiting) is displaced
    assert order.victim(rows[:2], for_=ticket(priority=-100)) is None


def test_a_turn_of_the_worse_class_is_not_taken_back() -> None:
    """A batch row that started ahead of interactive requests is not displaced by them."""
    order = ServiceOrder(ageing_s=1.0)
    batch = ticket("b", priority=1)
    enqueued(order, batch)
    enqueued(order, *(ticket("i", priority=-1) for _ in range(20)))
    running = [started(order, 2.0) for _ in range(STARTS_PER_TURN)]
    assert running[-1] is batch
    waiting = order.first(2.0)
    assert waiting is not None
    assert order.victim([batch], for_=waiting) is None
    rows = [batch, batch, ticket("b", priority=1)]
    other = ticket("c", priority=1)
    assert order.victim(rows, for_=other) is rows[2]
    assert order.victim([batch, batch, batch], for_=other) is None


def test_a_flow_with_many_rows_gives_one_to_a_flow_with_few() -> None:
    """As long as it has twice as many for its weight afterwards, and never within a flow."""
    order = ServiceOrder()
    rows = [ticket("a") for _ in range(8)]
    for row in rows:
        enqueued(order, row)
        order.start(row, 0.0)
    one = ticket("b")
    assert order.victim(rows, for_=one) is rows[-1]
    assert order.victim(rows, for_=ticket("a")) is None
    assert order.victim(rows[:2], for_=one) is None
    assert order.victim(rows[:3], for_=one) is rows[2]
    assert order.victim(rows[:3], for_=ticket("b", weight=0.9)) is None


@pytest.mark.parametrize("seed", range(20))
def test_rows_never_park_each_other_for_ever(seed: int) -> None:
    """With nothing ending and nothing arriving, displacing comes to an end, whatever waits and whatever runs."""
    chance = random.Random(seed)
    order = ServiceOrder(ageing_s=0.0)
    weights = {name: chance.choice([0.5, 1.0, 1.0, 3.0]) for name in "abcd"}
    for _ in range(40):
        flow = chance.choice("aaabcd")
        enqueued(order, ticket(flow, weight=weights[flow], priority=chance.choice([-1, 0, 0, 1, 1])))
    running = [started(order, 100.0) for _ in range(8)]
    pairs: set[tuple[int, int]] = set()
    waiting_in_turn = 0
    while waiting_in_turn < len(order):
        first = order.first(100.0)
        assert first is not None
        row = order.victim(running, for_=first)
        if row is None:
            # Nobody may make room for the first: it steps back, so that everybody has been first once.
            order.enqueue(restarted(order, first), 100.0)
            waiting_in_turn += 1
            continue
        assert (row.arrival, first.arrival) not in pairs, "who was displaced by it displaces it"
        pairs.add((first.arrival, row.arrival))
        assert len(pairs) < 200
        order.enqueue(row, 100.0)
        order.start(first, 100.0)
        running[running.index(row)] = first
        waiting_in_turn = 0


def restarted(order: ServiceOrder, one: Ticket) -> Ticket:
    """The same request charged for a turn, so that another flow is first next time."""
    order.start(one, 100.0)
    order.charge(one, 0, 50)
    return one


def test_no_flow_fills_the_queue() -> None:
    """One alone gets half, two a third each, and a newcomer always finds a place."""
    order = ServiceOrder(queue_max=120)
    while order.may_admit("a"):
        enqueued(order, ticket("a"))
    assert order.places_of("a") == 60
    while order.may_admit("b"):
        enqueued(order, ticket("b"))
    assert order.places_of("b") == 30
    for number in range(20):
        assert order.may_admit(f"new {number}")
        enqueued(order, ticket(f"new {number}"))
    assert len(order) == 110
    full = ServiceOrder(queue_max=1)
    assert full.may_admit("a")
    enqueued(full, ticket("a"))
    assert not full.may_admit("b")


def test_a_place_is_held_from_admission_to_the_row() -> None:
    """While a request is prepared it is not in line, and counts against the queue all the same."""
    order = ServiceOrder(queue_max=4)
    prepared, aborted = ticket("a"), ticket("a")
    order.admit(prepared)
    order.admit(aborted)
    assert (order.places, len(order), order.first(0.0)) == (2, 0, None)
    assert not order.may_admit("a")
    order.withdraw(aborted)
    assert order.may_admit("a")
    order.enqueue(prepared, 0.0)
    assert (order.places, len(order)) == (1, 1)
    assert started(order) is prepared
    assert order.places == order.places_of("a") == 0
    order.enqueue(prepared, 0.0)
    assert order.places == 1


def test_what_is_paid_and_not_used_goes_back() -> None:
    """A prompt that came from a cache costs its flow nothing."""
    order = ServiceOrder()
    cached = ticket("a", prompt=10_000)
    enqueued(order, cached, ticket("a", prompt=10), ticket("b", prompt=10), ticket("b", prompt=10))
    assert started(order) is cached
    order.charge(cached, 1, 1)
    order.withdraw(cached)
    flows = [started(order).flow for _ in range(3)]
    assert sorted(flows[:2]) == ["a", "b"]


def test_the_reason_says_why_a_request_waits() -> None:
    """One sentence for each of the rules."""
    order = ServiceOrder(ageing_s=15.0)
    first, second, other, urgent, batch = (
        ticket("a"),
        ticket("a"),
        ticket("b"),
        ticket("c", priority=-1),
        ticket("d", priority=1),
    )
    assert order.reason(first, 0.0) == "it is not in line"
    enqueued(order, first, second, other, batch)
    assert order.reason(first, 0.0) == "it is next, as soon as there is a row and memory for it"
    assert order.reason(second, 3.0) == (
        "it has waited 3 s: other requests of the same front-end go first (1 wait)"
    )
    assert "front-ends that were served less go first (1 wait)" in order.reason(other, 3.0)
    enqueued(order, urgent)
    assert "1 more urgent go first; after 15 s every 20th start is for normal requests" in order.reason(
        first, 0.0
    )
    assert "4 more urgent go first" in order.reason(batch, 0.0)
    order.start(first, 0.0)
    assert order.reason(first, 0.0) == "it runs"


def alive(name: str) -> int:
    """How many instances there are of the class with this name."""
    gc.collect()
    return sum(type(thing).__name__ == name for thing in gc.get_objects())


@pytest.mark.usefixtures("small_heap")
def test_nothing_of_a_request_stays_when_it_leaves() -> None:
    """Whatever it was doing: no ticket, no account and no place in a heap, with another request still there."""
    order = ServiceOrder()
    stays = ticket("stays")
    enqueued(order, stays)
    before = {name: alive(name) for name in ("Ticket", "_Account")}
    for number in range(2_000):
        one = ticket(f"flow {number % 500}", priority=number % 3 - 1)
        enqueued(order, one)
        if number % 3:
            order.start(one, 0.0)
        order.withdraw(one)
    del one
    assert alive("Ticket") == before["Ticket"]
    assert len(order) == 1
    order.start(stays, 0.0)
    order.withdraw(stays)
    assert alive("_Account") == before["_Account"] - 1


@pytest.mark.usefixtures("small_heap")
def test_flows_that_come_and_go_under_load_are_forgotten() -> None:
    """What is kept of flows that have left is bounded by what those that wait have not caught up with."""
    order = ServiceOrder()
    enqueued(order, *(ticket("busy") for _ in range(3_000)))
    before = alive("_Account")
    for number in range(3_000):
        enqueued(order, ticket(f"visitor {number}"))
        for _ in range(2 if number < 2_999 else 0):
            one = started(order)
            order.charge(one, 10, 5)
            order.withdraw(one)
    assert alive("_Account") < before + 20


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_a_plain_model_over_random_operations(seed: int) -> None:
    """10,000 operations in all: the same first, the same counts, the same victims as lists and `min` give."""
    chance = random.Random(seed)
    order, plain = ServiceOrder(ageing_s=5.0, queue_max=60), PlainOrder(ageing_s=5.0, queue_max=60)
    running: list[Ticket] = []
    waiting: list[Ticket] = []
    now_s = 0.0
    for _ in range(2_500):
        now_s += chance.random()
        kind = chance.random()
        if kind < 0.35:
            flow = chance.choice("aaabbcd")
            one = ticket(
                flow,
                priority=chance.choice([-2, -1, 0, 0, 0, 1, 4]),
                weight={"c": 2.0}.get(flow, 1.0),
                prompt=chance.randrange(1, 200),
            )
            assert order.may_admit(flow) == plain.may_admit(flow)
            if order.may_admit(flow):
                order.enqueue(one, now_s)
                plain.enqueue(one, now_s)
                waiting.append(one)
        elif kind < 0.55 and waiting:
            one = chance.choice(waiting) if kind < 0.37 else order.first(now_s) or waiting[0]
            order.start(one, now_s)
            plain.start(one, now_s)
            waiting.remove(one)
            running.append(one)
        elif kind < 0.75 and running:
            one = chance.choice(running)
            read, made = chance.randrange(100), chance.randrange(20)
            order.charge(one, read, made)
            plain.charge(one, read, made)
        elif kind < 0.85 and running:
            one = order.victim(running) or running[0]
            assert one is plain.victim(running)
            order.enqueue(one, now_s)
            plain.enqueue(one, now_s)
            running.remove(one)
            waiting.append(one)
        elif waiting or running:
            one = chance.choice(waiting + running)
            order.withdraw(one)
            plain.withdraw(one)
            (waiting if one in waiting else running).remove(one)
        assert order.first(now_s) is plain.first(now_s)
        assert len(order) == len(waiting)
        for flow in "abcd":
            assert order.places_of(flow) == sum(one.flow == flow for one in waiting)
        for one in waiting[:1]:
            assert order.victim(running, for_=one) is plain.victim(running, for_=one)
            assert order.reason(one, now_s)
