"""Random loads, unloads, requests and kills, with the invariants of `fleet_world`: every decision is checked there."""

from __future__ import annotations

import pytest

from tests.serve.fleet_world import GIB, World, facts, seeded
from zmqengine.errors import ZmqEngineError

EVENTS = 1000
SPAN_S = 2000.0
LASTS_MAX_S = 40.0
LOAD_MAX_S = 8.0


@pytest.mark.parametrize("seed", range(4))
def test_every_wait_ends_and_the_budget_holds(seed: int) -> None:
    """Never over budget, no request lost or doubled, no running request ended, and every wait ends."""
    draw = seeded(seed)
    names = [f"m{n}" for n in range(6)]
    models = [
        facts(
            name, draw.choice([2, 3, 5, 8, 9]), ttl_s=draw.choice([5, 60, 1e9]), pin=draw.random() < 0.1,
            preload=draw.random() < 0.2, signature="0",
        )
        for name in names
    ]  # fmt: skip
    broken = {name for name in names if draw.random() < 0.1}
    world = World(
        10,
        models,
        load_s=lambda name: draw.uniform(0.1, LOAD_MAX_S),
        fails=lambda name: name in broken or draw.random() < 0.05,
        holds=lambda name, requests: int(draw.uniform(0, 6 if requests else 2.2) * GIB),
    )

    def act() -> None:
        name = draw.choice(names)
        kind = draw.random()
        try:
            if kind < 0.6:
                keep_s = draw.choice([None, None, None, 0.0, 30.0, float("inf")])
                world.request(name, lasts_s=draw.uniform(0.01, LASTS_MAX_S), keep_s=keep_s)
            elif kind < 0.68:
                world.fleet.unload(name, world.now_s)
            elif kind < 0.75:
                world.fleet.load(name, world.now_s)
            elif kind < 0.83:
                world.crash(name, draw.choice([-9, 1, 0]))
            elif kind < 0.9:
                waiting = sorted(world.asked.keys() - world.released - world.refused.keys())
                if waiting:
                    world.give_up(draw.choice(waiting))
            elif kind < 0.94:
                world.set_foreign(draw.choice([0, 0, GIB, 4 * GIB]))
            elif kind < 0.97:
                world.raw[name] = 0 if world.raw.get(name) or world.state(name) != "ready" else 1
            else:
                changed = [
                    facts(
                        each.name, draw.choice([2, 5, each.need_bytes / GIB]), signature=str(draw.randrange(2)),
                        pin=each.pin,
                    )
                    for each in models
                    if draw.random() < 0.9
                ]  # fmt: skip
                world.configure(changed)
        except (ZmqEngineError, KeyError):
            # A command for a model that is off the list, or that cannot be loaded.
            return

    for _ in range(EVENTS):
        world.at(draw.uniform(0, SPAN_S), act)
    world.run(SPAN_S)
    world.raw.clear()
    world.set_foreign(0)
    world.configure(models)
    world.run(SPAN_S + len(names) * (120 + LASTS_MAX_S + 5 * LOAD_MAX_S + 60))

    outcomes = world.granted.keys() | world.refused.keys() | world.released
    assert outcomes == world.asked.keys()
    assert len(world.granted) > 100
    assert not any(model.holds or model.waiting for model in world.fleet.models.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_wait_is_bounded_by_the_turns_of_the_others(seed: int) -> None:
    """Four models of which no two fit: at most three turns of others and the own load, however requests come."""
    draw = seeded(seed)
    names, load_s, lasts_s = "abcd", 3.0, 6.0
    world = World(10, [facts(name, 6) for name in names], load_s=lambda name: load_s)

    def ask() -> None:
        world.request(draw.choice(names), lasts_s=draw.uniform(0.1, lasts_s))

    for _ in range(2000):
        world.at(draw.uniform(0, 1000), ask)
    world.run(1300)
    turn_s = load_s + 4 * load_s + lasts_s + world.drains_s + 1.1
    waits = [world.granted[ticket] - at_s for ticket, at_s in world.asked.items()]
    # Its own model may just have been closed, so that its whole turn lies ahead again.
    assert max(waits) <= 3 * turn_s + lasts_s + world.drains_s + 1.1 + load_s
    assert all(drained_s - ready_s >= load_s for ready_s, drained_s, _ in world.swaps())
