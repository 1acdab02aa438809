"""The scenarios by name."""

from __future__ import annotations

from zmqengine.bench.scenarios import (
    agents,
    burst,
    cancel,
    front_ends,
    interference,
    overload,
    prefix,
    trace,
    two_models,
    users,
)
from zmqengine.bench.scenarios.context import Context, Scenario

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (
        users,
        burst,
        interference,
        prefix,
        cancel,
        overload,
        agents,
        two_models,
        front_ends,
        trace,
    )
}

__all__ = ["SCENARIOS", "Context", "Scenario"]
