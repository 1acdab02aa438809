"""The phases of a connection and of a request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from tools import pages, phase_drawings
from zmqengine_client.core.phases import (
    CONNECTION,
    REQUEST,
    ConnectionEvent,
    Phase,
    RequestEvent,
    RequestPhase,
    follow,
)

TABLES: list[tuple[Mapping[Any, Mapping[Any, Any]], type[Enum], type[Enum], Enum, set[Enum]]] = [
    (CONNECTION, Phase, ConnectionEvent, Phase.IDLE, {Phase.CLOSED}),
    (REQUEST, RequestPhase, RequestEvent, RequestPhase.WAITING, {RequestPhase.ENDED}),
]


@pytest.mark.parametrize(("table", "phases", "events", "first", "final"), TABLES)
def test_every_phase_is_reached_and_left(
    table: Mapping[Any, Mapping[Any, Any]],
    phases: type[Enum],
    events: type[Enum],
    first: Enum,
    final: set[Enum],
) -> None:
    """No phase is a trap but the last one, none is beyond reach, and no event is never used."""
    assert set(table) == set(phases)
    assert {event for ways in table.values() for event in ways} == set(events)
    reached, new = set(), {first}
    while new:
        reached |= new
        new = {after for phase in new for after in table[phase].values()} - reached
    assert reached == set(phases)
    assert {phase for phase, ways in table.items() if not ways} == final


def test_a_way_that_is_not_in_the_table_is_refused() -> None:
    """A mistake of ours shows where it is made."""
    with pytest.raises(AssertionError, match="granted"):
        follow(CONNECTION, Phase.IDLE, ConnectionEvent.GRANTED)
    with pytest.raises(AssertionError, match="ended"):
        follow(REQUEST, RequestPhase.ENDED, RequestEvent.INSERTED)


def test_the_drawings_are_current() -> None:
    """docs/client.md shows the tables that the code goes by."""
    page = (pages.ROOT / phase_drawings.PAGE).read_text("utf-8")
    assert page == pages.filled(phase_drawings.PAGE, phase_drawings.parts()), "run: python -m tools"
