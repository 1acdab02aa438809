"""The launcher's decisions: memory, turns, waiting. No process, no socket, no clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.serve.fleet_world import GIB, World, facts
from zmqengine.errors import ModelLoadError, NeverFits, Overloaded, UnknownModel
from zmqengine.serve.model import LULL_LEAST_S, SPELL_LEAST_S, SPELL_MOST_S


def test_a_request_loads_its_model_and_waits_for_it() -> None:
    world = World(10, [facts("a", 4)])
    ticket = world.request("a")
    assert world.state("a") == "loading"
    assert ticket not in world.granted
    world.run(2.5)
    assert world.granted[ticket] == 2.0


def test_two_models_that_fit_are_loaded_side_by_side() -> None:
    world = World(10, [facts("a", 4), facts("b", 5)])
    world.request("a")
    world.request("b")
    world.run(3)
    assert (world.state("a"), world.state("b")) == ("ready", "ready")


def test_two_loads_at_once_never_take_more_than_there_is() -> None:
    """The memory of a model that is only loading counts already."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=1)
    world.request("b")
    assert (world.state("a"), world.state("b")) == ("loading", "unloaded")
    world.run(60)
    assert world.state("b") == "ready"
    assert len(world.granted) == 2


def test_the_least_recently_used_model_gives_way() -> None:
    world = World(10, [facts("a", 4), facts("b", 4), facts("c", 4)])
    world.request("a")
    world.request("b")
    world.run(20)
    world.request("a")
    world.run(40)
    world.request("c")
    world.run(60)
    assert [world.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]


def test_only_as_much_gives_way_as_is_needed() -> None:
    """A small model that is older stays where a larger one must leave anyway."""
    world = World(12, [facts("small", 1), facts("large", 9), facts("new", 10)])
    world.request("small")
    world.run(20)
    world.request("large")
    world.run(40)
    world.request("new")
    world.run(60)
    assert [world.state(name) for name in ("small", "large", "new")] == ["ready", "unloaded", "ready"]


def test_a_pinned_model_never_gives_way() -> None:
    world = World(10, [facts("a", 6, pin=True), facts("b", 4), facts("c", 4)])
    for name in "abc":
        world.request(name)
        world.run(world.now_s + 60)
    assert [world.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]


def test_a_model_that_cannot_fit_is_refused_at_once_with_the_numbers() -> None:
    world = World(10, [facts("a", 12), facts("p", 6, pin=True), facts("b", 5)])
    world.request("p")
    world.run(5)
    alone, beside = world.request("a"), world.request("b")
    assert isinstance(world.refused[alone], NeverFits)
    assert "12.00 GiB" in str(world.refused[alone])
    assert isinstance(world.refused[beside], NeverFits)
    assert "pinned" in str(world.refused[beside])


def test_the_claims_of_other_workers_count() -> None:
    world = World(10, [facts("a", 6)])
    world.set_foreign(5 * GIB)
    refused = world.request("a")
    error = world.refused[refused]
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms
    assert "5.00 GiB" in str(error)
    world.set_foreign(4 * GIB)
    granted = world.request("a")
    world.run(5)
    assert granted in world.granted


def test_a_running_request_is_never_ended_for_another_model() -> None:
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=500)
    waiting = world.request("b")
    world.run(495)
    assert world.state("a") == "ready"
    assert waiting not in world.granted
    world.run(510)
    assert waiting in world.granted


def test_a_granted_request_that_has_not_reached_its_worker_is_not_ended_either() -> None:
    """The worker knows of none yet: the launcher's own count counts it."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=500)
    world.raw["a"] = -1
    waiting = world.request("b")
    world.run(495)
    assert world.state("a") == "ready"
    assert waiting not in world.granted
    world.raw["a"] = 0
    world.run(510)
    assert waiting in world.granted


def test_a_request_that_came_past_the_launcher_is_not_ended_either() -> None:
    """A program may know the address of a worker: the worker's own count is what says that it is idle."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=0.5)
    world.run(20)
    world.raw["a"] = 1
    waiting = world.request("b")
    world.run(100)
    assert world.state("a") == "ready"
    assert waiting not in world.granted
    world.raw["a"] = 0
    world.run(110)
    assert waiting in world.granted


@pytest.mark.parametrize(("every_s", "ends_s"), [(1.0, SPELL_LEAST_S), (1e9, LULL_LEAST_S)])
def test_a_model_stays_for_its_spell_while_it_is_used(every_s: float, ends_s: float) -> None:
    """An idle one gives way sooner: a user who changes models does not wait for the former one."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=0.1)
    world.run(2.1)
    world.request("b")
    for step in range(1, 20):
        if step * every_s < 20:
            world.request_at(2.1 + step * every_s, "a", 0.1)
    world.run(2 + ends_s - 0.1)
    assert world.state("a") == "ready"
    world.run(2 + ends_s + 1)
    assert world.state("b") == "loading"


def test_a_busy_model_takes_requests_until_the_end_of_its_spell() -> None:
    """Also where a single long request runs: it is in use, however long ago that was granted."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=100)
    world.run(2.1)
    world.request("b")
    world.run(2 + SPELL_LEAST_S - 1)
    early = world.request("a", lasts_s=0.1)
    assert early in world.granted
    world.run(2 + SPELL_LEAST_S + 1)
    late = world.request("a", lasts_s=0.1)
    assert late not in world.granted


def test_a_storm_over_two_models_swaps_once_a_spell() -> None:
    """llama-swap#612: alternating requests swap models every time. Here they are collected."""
    load_s = 3.0
    world = World(10, [facts("a", 6), facts("b", 6)], load_s=lambda name: load_s)
    for step in range(1200):
        name = "ab"[step % 2]
        world.request_at(step * 0.25, name, 2.0)
    world.run(400)
    assert len(world.granted) == 1200
    spell_s = max(SPELL_LEAST_S, 4 * load_s)
    # The requests end at 300 s, and a model without them gives way sooner.
    swaps = [swap for swap in world.swaps() if swap[1] < 300]
    assert all(drained_s - ready_s >= spell_s for ready_s, drained_s, _ in swaps)
    # In turn, and about as often as load, spell, last request and drain allow.
    assert [name for _, _, name in swaps][:6] == ["a", "b", "a", "b", "a", "b"]
    assert 300 / (spell_s + load_s + 2.0 + 1.0) - 2 <= len(swaps) <= 300 / (spell_s + load_s) + 1
    # The bound of one turn: the other's load, spell, last request and end, then the own load.
    waits = [world.granted[ticket] - world.asked[ticket] for ticket in world.granted]
    assert max(waits) <= 2 * load_s + spell_s + 2.0 + 1.0 + 0.5


def test_a_long_load_has_a_long_spell_within_a_bound() -> None:
    world = World(10, [facts("a", 6), facts("b", 6)], load_s=lambda name: 60.0)
    world.request("a", lasts_s=0.1)
    world.run(61)
    for step in range(200):
        world.request_at(61 + step * 0.9, "a", 1.0)
    waiting = world.request("b")
    world.run(60 + SPELL_MOST_S - 1)
    assert world.state("b") == "unloaded"
    world.run(60 + SPELL_MOST_S + 64)
    assert waiting in world.granted


def test_a_model_that_waits_for_much_is_not_overtaken_for_ever() -> None:
    """Small models come and go; the large one that waits gets what they give back."""
    world = World(10, [facts("large", 9), *(facts(f"s{n}", 3) for n in range(4))])
    for step in range(800):
        name = f"s{step % 4}"
        world.request_at(step * 0.5, name, 3.0)
    world.run(50)
    ticket = world.request("large")
    world.run(400)
    assert world.granted[ticket] - world.asked[ticket] <= 4 * (SPELL_LEAST_S + 2 + 3 + 1)
    world.run(900)
    assert len(world.granted) == 801


def test_a_model_is_unloaded_when_it_was_idle_for_its_ttl() -> None:
    world = World(10, [facts("a", 4, ttl_s=30)])
    world.request("a", lasts_s=5)
    world.run(36)
    assert world.state("a") == "ready"
    world.run(40)
    assert world.state("a") == "unloaded"


def test_requests_that_came_past_the_launcher_are_use_too() -> None:
    world = World(10, [facts("a", 4, ttl_s=30)], holds=lambda name, requests: 0)
    world.request("a", lasts_s=1)
    world.run(10)
    world.raw["a"] = 1
    world.run(100)
    world.raw["a"] = 0
    world.run(125)
    assert world.state("a") == "ready"
    world.run(140)
    assert world.state("a") == "unloaded"


@pytest.mark.parametrize(("keep_s", "idle_s", "state"), [(0, 3, "unloaded"), (float("inf"), 9e6, "ready")])
def test_keep_alive_of_a_request_replaces_the_ttl(keep_s: float, idle_s: float, state: str) -> None:
    world = World(10, [facts("a", 4, ttl_s=30)])
    world.request("a", keep_s=keep_s, lasts_s=0.5)
    world.run(idle_s)
    assert world.state("a") == state


def test_keep_alive_ends_with_the_load_it_was_given_for() -> None:
    world = World(10, [facts("a", 4, ttl_s=30)])
    world.request("a", keep_s=0, lasts_s=0.5)
    world.run(5)
    world.request("a", lasts_s=0.5)
    world.run(20)
    assert world.state("a") == "ready"


@pytest.mark.parametrize("by_command", [False, True])
def test_a_keep_alive_that_comes_while_the_model_leaves_is_for_its_return(by_command: bool) -> None:
    world = World(10, [facts("a", 4, ttl_s=30)])
    world.request("a", keep_s=0, lasts_s=0.5)
    world.run(2.6)
    assert world.state("a") == "draining"
    if by_command:
        world.fleet.load("a", world.now_s, keep_s=600)
        world.settle()
    else:
        world.request("a", keep_s=600, lasts_s=0.5)
    world.run(300)
    assert world.state("a") == "ready"
    world.run(700)
    assert world.state("a") == "unloaded"


def test_a_model_that_fails_five_times_is_left_alone_with_its_reason() -> None:
    world = World(10, [facts("a", 4), facts("b", 4)], fails=lambda name: name == "a")
    first = world.request("a")
    world.run(60)
    assert world.state("a") == "failed"
    starts = [life.started_s for life in world.lives if life.name == "a"]
    # A load of 2 s, then a wait that doubles.
    assert [later - earlier for earlier, later in pairwise(starts)] == pytest.approx([2.1, 2.2, 2.4, 2.8])
    assert isinstance(world.refused[first], ModelLoadError)
    assert "last words" in str(world.refused[first])
    second = world.request("a")
    assert second in world.refused
    assert sum(life.name == "a" for life in world.lives) == 5
    other = world.request("b")
    world.run(70)
    assert other in world.granted
    # By command it is tried again.
    world.fails = lambda name: False
    world.fleet.load("a", world.now_s)
    world.settle()
    world.run(80)
    assert world.state("a") == "ready"


def test_a_request_that_runs_is_refused_when_its_model_fails() -> None:
    """It would wait for a worker that never comes."""
    world = World(10, [facts("a", 4, restarts_max=1)])
    running = world.request("a", lasts_s=100)
    world.run(3)
    assert running in world.granted
    world.crash("a")
    world.run(4)
    assert world.state("a") == "failed"
    assert isinstance(world.refused[running], ModelLoadError)
    assert not world.fleet.models["a"].holds


def test_a_worker_that_has_served_and_dies_is_started_again_in_its_place() -> None:
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=100)
    world.run(3)
    waiting = world.request("b")
    world.crash("a")
    assert world.state("a") == "loading"
    world.run(10)
    assert world.state("a") == "ready"
    assert waiting not in world.granted


@pytest.mark.parametrize(("lasts_s", "state"), [(100.0, "ready"), (0.5, "unloaded")])
def test_a_worker_that_is_drained_by_others_comes_back_for_who_holds_it(lasts_s: float, state: str) -> None:
    """`zmqengine drain` of one worker: a program that has its address waits for a worker there."""
    world = World(10, [facts("a", 6)])
    world.request("a", lasts_s=lasts_s)
    world.run(4)
    world.crash("a", 0)
    world.run(10)
    assert world.state("a") == state


def test_unload_waits_for_running_requests_and_those_that_wait_load_it_again() -> None:
    world = World(10, [facts("a", 6)])
    world.request("a", lasts_s=20)
    world.run(3)
    world.fleet.unload("a", world.now_s)
    world.settle()
    later = world.request("a")
    world.run(21)
    assert world.state("a") == "ready"
    assert later not in world.granted
    world.run(30)
    assert later in world.granted
    assert len(world.lives) == 2


def test_unload_ends_a_load_at_once() -> None:
    world = World(10, [facts("a", 6)], load_s=lambda name: 500.0)
    world.fleet.load("a", 0.0)
    world.settle()
    world.run(5)
    world.fleet.unload("a", world.now_s)
    world.settle()
    world.run(7)
    assert world.state("a") == "unloaded"


def test_preload_and_the_order_of_wishes() -> None:
    world = World(10, [facts("a", 6, preload=True), facts("b", 3, preload=True), facts("c", 1)])
    world.run(5)
    assert [world.state(name) for name in "abc"] == ["ready", "ready", "unloaded"]


def test_a_model_off_the_list_refuses_and_finishes_what_runs() -> None:
    world = World(10, [facts("a", 6), facts("b", 6)])
    running = world.request("a", lasts_s=30)
    world.run(3)
    world.configure([facts("b", 6)])
    late = world.request("a")
    assert isinstance(world.refused[late], UnknownModel)
    world.run(20)
    assert running not in world.released
    assert world.state("a") == "ready"
    world.run(40)
    assert running in world.released
    assert "a" not in world.fleet.models


def test_a_model_that_crashed_and_was_taken_off_the_list_is_not_started_again() -> None:
    """Between the crash and the next start; the launcher has no options for it any more."""
    world = World(10, [facts("a", 6)])
    world.request("a", lasts_s=30)
    world.run(3)
    world.crash("a", 1)
    world.configure([])
    world.run(20)
    assert "a" not in world.fleet.models
    assert len(world.lives) == 1


def test_a_model_that_comes_back_on_the_list_is_served_again() -> None:
    """Also while its worker still had to leave."""
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.request("a", lasts_s=30)
    world.run(3)
    world.configure([facts("b", 6)])
    world.configure([facts("a", 6), facts("b", 6)])
    again = world.request("a")
    world.run(60)
    assert again in world.granted
    assert len(world.lives) == 1


def test_a_changed_model_is_replaced_and_an_unchanged_one_is_not_touched() -> None:
    world = World(10, [facts("a", 4, signature="1"), facts("b", 4, signature="1")])
    world.request("a")
    world.request("b")
    world.run(20)
    changed = [facts("a", 4, signature="2"), facts("b", 4, signature="1", pin=True, ttl_s=5)]
    world.configure(changed)
    world.run(30)
    assert [world.state(name) for name in "ab"] == ["unloaded", "ready"]
    assert sum(life.name == "b" for life in world.lives) == 1


def test_a_worker_that_does_not_end_is_killed() -> None:
    world = World(10, [facts("a", 6), facts("b", 6)])
    world.drains_s = 1e9
    world.request("a")
    world.run(20)
    ticket = world.request("b")
    world.run(200)
    assert world.kills == 1
    assert ticket in world.granted


def test_the_memory_of_an_idle_worker_counts_from_then_on() -> None:
    world = World(10, [facts("a", 3), facts("b", 5)], holds=lambda name, requests: 7 * GIB)
    world.request("a")
    world.run(10)
    world.request("b")
    world.run(30)
    assert [world.state(name) for name in "ab"] == ["unloaded", "ready"]


def test_the_memory_of_requests_counts_while_they_run() -> None:
    """One burst does not make two models exclude each other for ever: an idle one holds less."""
    world = World(10, [facts("a", 3), facts("b", 5)], holds=lambda name, requests: requests * 7 * GIB)
    running = world.request("a", lasts_s=30)
    world.run(10)
    waiting = world.request("b")
    world.run(25)
    assert waiting not in world.granted
    world.run(45)
    assert {running, waiting} <= world.granted.keys()
    world.request("a")
    world.run(60)
    assert [world.state(name) for name in "ab"] == ["ready", "ready"]


def test_the_requests_of_a_pinned_model_shut_nothing_out() -> None:
    """It never gives way, so what its requests hold beyond its need is bounded by the claims of workers instead."""
    world = World(
        10, [facts("a", 3, pin=True), facts("b", 5)], holds=lambda name, requests: requests * 7 * GIB
    )
    world.request("a", lasts_s=500)
    world.run(10)
    waiting = world.request("b")
    world.run(20)
    assert waiting in world.granted


def test_a_worker_keeps_its_memory_until_it_ends_whatever_the_list_says() -> None:
    world = World(10, [facts("a", 9), facts("b", 5)])
    world.request("a", lasts_s=30)
    world.run(5)
    world.configure([facts("a", 2, signature="smaller"), facts("b", 5)])
    waiting = world.request("b")
    world.run(25)
    assert waiting not in world.granted
    world.run(60)
    assert waiting in world.granted


@pytest.mark.parametrize("load_s", [1.0, 500.0])
def test_a_request_that_waits_is_granted_before_a_command_to_unload_counts(load_s: float) -> None:
    """Whatever somebody else commands meanwhile, and however often."""
    world = World(10, [facts("a", 6, pin=True)], load_s=lambda name: load_s)
    ticket = world.request("a", lasts_s=1)
    while ticket not in world.granted and world.now_s < 2 * load_s + 10:
        world.run(world.now_s + 0.3)
        world.fleet.unload("a", world.now_s)
        world.settle()
    assert ticket in world.granted
    world.run(world.now_s + 5)
    assert world.state("a") == "unloaded"
    assert len(world.lives) == 1


def test_commands_in_turn_start_a_worker_in_ten_seconds_at_most() -> None:
    """Loading and unloading a model three times a second for a minute, beside requests of others."""
    world = World(10, [facts("a", 6)], load_s=lambda name: 0.5)
    tickets = []
    while world.now_s < 60:
        world.fleet.load("a", world.now_s)
        world.settle()
        world.fleet.unload("a", world.now_s)
        world.settle()
        if int(world.now_s) % 5 == 0:
            tickets.append(world.request("a", lasts_s=0.1))
        world.run(world.now_s + 0.3)
    world.run(80)
    assert len(world.lives) <= 8
    assert all(ticket in world.granted for ticket in tickets)
