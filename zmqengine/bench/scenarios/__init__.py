"""Scenarios by name. Each module here holds one, as `SCENARIO`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqengine.bench.scenarios.long_context import Scenario

SCENARIO_NAMES = (
    "users",
    "burst",
    "interference",
    "prefix",
    "cancel",
    "overload",
    "agents",
    "two-models",
    "front-ends",
    "chat",
    "trace",
)


def scenario_named(name: str) -> Scenario:
    """The scenario, imported now: `bench --help` lists the names without numpy."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    scenario: Scenario = module.SCENARIO
    return scenario
